"""Tables of each class against scikit-learn's, from the counts up to the files of eval.py."""

import csv

import numpy as np
import pytest
import torch
from PIL import Image

from tests.engine.runs import ALONE, CLASSES, eval_main, small_model, write_images
from tresnet.checkpoints.creation import create
from tresnet.checkpoints.save import save_checkpoint
from tresnet.data.sources import open_split
from tresnet.data.transforms import eval_transform
from tresnet.engine.per_class import ClassCounter, write
from tresnet.settings import EvalTransform

metrics = pytest.importorskip("sklearn.metrics")


def counted(logits, targets, threshold=None):
    counter = ClassCounter(logits.shape[1], threshold)
    for part in torch.arange(len(logits)).split(9):
        counter.add(logits[part], targets[part])
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
    monkeypatch.undo()  # `undrawn` hides matplotlib
    pytest.importorskip("matplotlib")
    names = ["$a", "b, \udcff$", "猫\n", *map(str, range(3, classes))]
    counts = counted(torch.eye(classes), torch.arange(classes))
    assert write(tmp_path, counts, names)[-1] == "confusion.png"
    assert [row[0] for row in table(tmp_path / "confusion.csv")[1:]] == names
    assert table(tmp_path / "confusion.csv")[0][1:] == names
    with Image.open(tmp_path / "confusion.png") as picture:
        colors = picture.convert("RGB").getcolors(1 << 20)
    assert (8, 48, 107) in [color for _, color in colors]  # the darkest blue: all are right


def test_evaluation_writes_what_the_model_predicts(tmp_path, capsys):
    """The test split has two of three classes, in another order than the outputs."""
    torch.manual_seed(3)
    model = small_model()
    model.pretrained_cfg |= {"input_size": (3, 12, 12), "crop_pct": 1.0}
    outputs = ["red", *CLASSES[:2]]
    save_checkpoint(model, tmp_path / "w.pth", metadata={"classes": outputs})
    write_images(tmp_path / "data", CLASSES[:2], test=9)
    command = f"--data {tmp_path / 'data'} --split test --weights {tmp_path / 'w.pth'}"
    command += f" --device cpu --workers 0 --batch-size 4 --per-class {tmp_path / 'classes'}"
    assert eval_main(command) == 0
    assert f"{tmp_path / 'classes'}: per_class.csv, confusion.csv" in capsys.readouterr().out
    model = create(weights=tmp_path / "w.pth").eval()
    cfg = EvalTransform(input_size=12, crop_mode="center", crop_pct=1.0)
    dataset = open_split(tmp_path / "data", "test", eval_transform(cfg))
    with torch.no_grad():
        predicted = [outputs[int(model(image[None] / 255).argmax())] for image, _ in dataset]
    labels = [dataset.classes[label] for label in dataset.targets]
    rows = table(tmp_path / "classes" / "confusion.csv")
    expected = metrics.confusion_matrix(labels, predicted, labels=rows[0][1:])
    assert [list(map(int, row[1:])) for row in rows[1:]] == expected.tolist()
    assert [row[0] for row in rows[1:]] == ["blue", "green", "red"]
    assert eval_main(command) == 2
    assert "per_class.csv exists: choose another name, or add" in capsys.readouterr().err
    assert eval_main(f"{command} --overwrite") == 0
    assert eval_main(f"{command} --overwrite --per-class {tmp_path / 'a' / 'b'}") == 2
    assert f"there is no directory {tmp_path / 'a'}" in capsys.readouterr().err
