import csv
import math

import pytest
import torch
from torch.nn import functional

from tests.engine.runs import ALONE
from tresnet.engine.evaluate import evaluate
from tresnet.engine.per_class import ClassCounter, write
from tresnet.errors import DataError, OutputError
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
