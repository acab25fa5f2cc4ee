import csv
import math
from unittest.mock import Mock

import pytest
import torch
from torch.nn import functional

from tests.engine.runs import ALONE
from tresnet.engine import evaluate as engine_evaluate
from tresnet.engine import score_store
from tresnet.engine.evaluate import evaluate
from tresnet.engine.per_class import ClassCounter, write
from tresnet.engine.score_store import ScoreStore
from tresnet.errors import DataError, OutputError, WriteError
from tresnet.measure.memory_meter import MemoryMeter
from tresnet.settings import Compute, InferenceCompute
from tresnet.steps.feed import Feed


class LookUp:
    """Stands in for a step: image i is the number i, whose logits are looked up."""

    setting_up = False

    def __init__(self, logits):
        self.logits = logits
        self.compute = InferenceCompute(amp="off", dtype="fp16")
        self.feed = Feed(Compute(), ALONE.device, keep_bytes=False)

    def __call__(self, images):
        return self.logits[images[:, 0, 0, 0].long()]


class Batches(list):
    """Stands in for a loader."""

    skipped = ()


def run(logits, labels, batch_size=3, threshold=None, **options):
    images = torch.arange(len(labels)).float().view(-1, 1, 1, 1)
    whole = images, torch.as_tensor(labels)
    batches = zip(*(tensor.split(batch_size) for tensor in whole), strict=True)
    return evaluate(threshold, LookUp(logits), Batches(batches), ALONE, **options)


def test_metrics_are_means_over_all_images_whatever_the_batches():
    logits = torch.randn(31, 7)
    labels = [i * 5 % 7 for i in range(31)]
    targets = torch.tensor(labels)
    order = logits.argsort(dim=1, descending=True)
    top1 = 100 * (order[:, 0] == targets).double().mean().item()
    top5 = 100 * (order[:, :5] == targets[:, None]).any(1).double().mean().item()
    assert 0 < top1 < top5 < 100
    for batch_size in (1, 4, 31, 50):
        found = run(logits, labels, batch_size)
        assert found.images == 31
        assert found.loss == pytest.approx(functional.cross_entropy(logits, targets).item())
        assert (found.top1, found.top5) == pytest.approx((top1, top5))
        assert found.images_per_s > 0


def test_labels_are_mapped_to_the_models_classes():
    logits = torch.eye(3)
    assert (run(logits, [2, 0, 1]).top1, run(logits, [2, 0, 1]).top5) == (0, None)
    assert "top-5" not in run(logits, [2, 0, 1]).summary()
    assert run(logits, [2, 0, 1], output_order=[1, 2, 0]).top1 == 100


def test_no_readable_image_is_an_error():
    with pytest.raises(DataError, match="expected images to evaluate, but none could be read"):
        run(torch.zeros(1, 3), torch.zeros(0, dtype=torch.int64))


def test_accuracy_counts_among_the_classes_of_a_level():
    """A parent's logit is higher than its child's wherever the child's loss is small."""
    logits = torch.tensor([3.0, 1.0, 2.0]).expand(4, 3)
    assert run(logits, [0, 1, 1, 2], levels=torch.tensor([0, 1, 0])).top1 == 75


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("multi", [False, True])
def test_outputs_that_are_not_finite_are_counted_and_not_scored(value, multi):
    logits, labels = torch.randn(7, 3), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    logits[2, 1] = logits[5, 0] = logits[5, 2] = value
    targets = functional.one_hot(labels).float() if multi else labels
    message = "infinities or NaN for 2 of 7 images in fp16: choose --dtype fp32, or bf16"
    with pytest.raises(OutputError, match=message):
        run(logits, targets, threshold=0.5 if multi else None)


def test_equal_outputs_give_one_prediction_in_all_figures(tmp_path):
    """Compare the table of classes with top-1; in bf16 many logits of many classes are equal."""
    logits = torch.randn(400, 50).mul(4).round().div(4).bfloat16().float()
    labels = [i % 50 for i in range(400)]
    counter = ClassCounter(50)
    found = run(logits, labels, 64, counter=counter)
    write(tmp_path, counter.counts(ALONE), [str(i) for i in range(50)])
    with (tmp_path / "per_class.csv").open() as file:
        correct = sum(int(row["correct"]) for row in csv.DictReader(file))
    assert found.top1 == 100 * correct / 400
    first = (logits == logits.amax(1, keepdim=True)).float().argmax(1)
    assert correct == (first == torch.tensor(labels)).sum()


@pytest.mark.parametrize("in_memory", [1 << 30, 0])
def test_scores_in_a_file_give_scikit_learns_figures(monkeypatch, in_memory):
    metrics = pytest.importorskip("sklearn.metrics")
    monkeypatch.setattr(score_store, "_IN_MEMORY_BYTES", in_memory)
    monkeypatch.setattr(score_store, "_CHUNK_BYTES", 5 * 11 * 20)  # three batches of 7 images
    monkeypatch.setattr(engine_evaluate, "_BLOCK_BYTES", 5 * 58 * 4)
    logits = torch.randn(58, 11).mul(4).round().div(4)
    targets = (torch.rand(58, 11) < 0.3).float()
    targets[:, 3] = 0
    thresholds = tuple(torch.rand(11).tolist())
    found = run(logits, targets, 7, threshold=thresholds)
    has = targets.any(0).numpy()
    truth, scores = targets.numpy(), logits.numpy()
    expected = metrics.average_precision_score(truth[:, has], scores[:, has], average=None)
    assert found.per_class_ap[3] is None
    assert [v for v in found.per_class_ap if v is not None] == pytest.approx(100 * expected)
    predicted = (logits.double().sigmoid() >= torch.tensor(thresholds).double()).numpy()
    micro = metrics.f1_score(truth, predicted, average="micro")
    macro = metrics.f1_score(truth[:, has], predicted[:, has], average="macro")
    assert (found.f1_micro, found.f1_macro) == pytest.approx((100 * micro, 100 * macro))
    loss = functional.binary_cross_entropy_with_logits(logits, targets)
    assert found.loss == pytest.approx(loss.item())


def test_scores_of_many_images_take_little_memory(monkeypatch):
    """400 MiB of scores and labels go through a file, and are read in blocks of 16 MiB."""
    monkeypatch.setattr(score_store, "_IN_MEMORY_BYTES", 2**24)
    monkeypatch.setattr(score_store, "_CHUNK_BYTES", 2**22)
    monkeypatch.setattr(engine_evaluate, "_BLOCK_BYTES", 2**24)
    images, classes, meter = 40_000, 2_100, MemoryMeter("cpu")
    store = ScoreStore(images, classes)
    meter.reset_peak()
    before = meter.snapshot().rss_peak
    for number in range(0, images, 500):
        store.add(torch.full((500, classes), float(number)), torch.ones(500, classes).bool())
    for begin in range(0, classes, 84):
        scores, labels = store.read(begin, begin + 84)
        assert scores[::500, 0].tolist() == [*range(0, images, 500)]
        assert labels.all()
    store.close()
    assert meter.snapshot().rss_peak - before < 100 * 2**20


def test_a_disk_that_is_too_small_is_an_error_before_the_first_batch_is_stored(monkeypatch):
    monkeypatch.setattr(score_store.shutil, "disk_usage", lambda folder: Mock(free=2**30))
    message = r"expected 76.0 GiB free in .* 1700000 images and 9605 classes, got 1.0 GiB: set TMPD"
    with pytest.raises(WriteError, match=message):
        ScoreStore(1_700_000, 9605)
