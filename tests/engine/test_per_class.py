"""Tables of each class against scikit-learn's, counts and files."""

import csv
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from tests.engine.runs import ALONE
from tresnet.engine.per_class import ClassCounter, write

metrics = pytest.importorskip("sklearn.metrics")


def counted(logits, targets, threshold=None):
    counter = ClassCounter(logits.shape[1])
    predicted = logits.argmax(1) if threshold is None else logits.sigmoid() >= threshold
    for part in torch.arange(len(logits)).split(9):
        counter.add(targets[part], predicted[part])
    return counter.counts(ALONE)


def table(path):
    with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        return list(csv.reader(file))


def scores(path):
    """Return precision, recall and F1 of each class, 0 where the table has none."""
    return [[float(cell or 0) / 100 for cell in row[5:]] for row in table(path)[1:]]


def test_classes_are_counted_as_scikit_learn_counts_them(tmp_path):
    """Class 6 has no image, and class 5 is never predicted."""
    logits, targets = torch.randn(50, 7), torch.randint(6, (50,))
    logits[:, 5] = -9
    counts = counted(logits, targets)
    pair = targets.numpy(), logits.argmax(1).numpy()
    expected = metrics.confusion_matrix(*pair, labels=range(7))
    assert counts.confusion.numpy().tolist() == expected.tolist()
    write(tmp_path, counts, "abcdefg")
    expected = metrics.precision_recall_fscore_support(*pair, labels=range(7), zero_division=0)
    np.testing.assert_allclose(scores(tmp_path / "per_class.csv"), np.stack(expected[:3], 1), 1e-5)
    rows = table(tmp_path / "per_class.csv")
    assert [int(row[1]) for row in rows[1:]] == expected[3].tolist()
    assert (rows[6][5], rows[7][4]) == ("", "")  # no prediction, no image


def test_many_labels_are_counted_as_scikit_learn_counts_them(tmp_path):
    logits, targets = torch.randn(60, 5), (torch.rand(60, 5) < 0.4).float()
    targets[:, 4] = 0
    counts = counted(logits, targets, threshold=0.6)
    pair = targets.numpy().astype(int), (logits.sigmoid() >= 0.6).numpy().astype(int)
    for index, matrix in enumerate(metrics.multilabel_confusion_matrix(*pair)):
        (_, false), (missed, hits) = matrix.tolist()
        assert counts.correct[index] == hits
        assert (counts.images[index], counts.predicted[index]) == (hits + missed, hits + false)
    both = (targets[:, 1] > 0) & (logits[:, 3].sigmoid() >= 0.6)
    assert counts.confusion[1, 3] == both.sum()
    write(tmp_path, counts, "abcde", [90.0, 80.0, 70.0, 60.0, None])
    expected = metrics.precision_recall_fscore_support(*pair, zero_division=0)
    np.testing.assert_allclose(scores(tmp_path / "per_class.csv"), np.stack(expected[:3], 1), 1e-5)
    assert [row[4] for row in table(tmp_path / "per_class.csv")][::5] == ["average_precision", ""]


@pytest.mark.parametrize("classes", [3, 16, 70])
def test_names_are_written_and_drawn_as_they_are(classes, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.figure")  # hidden by a fixture
    pytest.importorskip("matplotlib")
    names = ["$a", "b, \udcff$", "猫\n", *map(str, range(3, classes))]
    counts = counted(torch.eye(classes), torch.arange(classes))
    assert write(tmp_path, counts, names)[-1] == "confusion.png"
    assert [row[0] for row in table(tmp_path / "confusion.csv")[1:]] == names
    assert table(tmp_path / "confusion.csv")[0][1:] == names
    with Image.open(tmp_path / "confusion.png") as picture:
        colors = picture.convert("RGB").getcolors(1 << 20)
    assert (8, 48, 107) in [color for _, color in colors]  # the darkest blue: all are right
