import math

import mpmath
import numpy as np
import pytest
import torch
from timm.loss import AsymmetricLossMultiLabel
from torch import nn
from torch.nn import functional

from tests.engine.ddp_train import make_without_norms
from tests.engine.runs import ALONE, draw, rows_of
from tresnet.data.dataset import ImageDataset, Paths
from tresnet.data.labels import Labels
from tresnet.engine.losses import AsymmetricLoss, Losses, LossMeter, class_weights
from tresnet.engine.state import seed_everything
from tresnet.engine.train import train
from tresnet.errors import ConfigError

LABELS = torch.tensor([0, 1, 2, 1])
WEIGHTS = torch.tensor([3, 1, 0.25])
UNMIXED = {"mixup": 0.0, "label_smoothing": 0.0}
binary = functional.binary_cross_entropy_with_logits


def images():
    return torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("weights", "options", "expected"),
    [
        (None, {"label_smoothing": 0.3}, nn.CrossEntropyLoss(label_smoothing=0.3)),
        (WEIGHTS, {"label_smoothing": 0.1}, nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1)),
        (
            None,
            {"loss": "one-vs-all", "bce_target_thresh": 0.2},
            lambda logits, labels: binary(logits, functional.one_hot(labels, 3).float()),
        ),
        (None, {"loss": "bce"}, binary),
        (WEIGHTS, {"loss": "bce"}, nn.BCEWithLogitsLoss(pos_weight=WEIGHTS)),
        (
            None,
            {"loss": "asymmetric", "gamma_neg": 3.0, "prob_margin": 0.1},
            AsymmetricLossMultiLabel(gamma_neg=3, gamma_pos=1, clip=0.1),
        ),
        (WEIGHTS, {"loss": "asymmetric"}, AsymmetricLossMultiLabel(pos_weight=WEIGHTS)),
    ],
)
def test_images_that_are_not_mixed_have_the_configured_loss(tiny, weights, options, expected):
    config = tiny(**UNMIXED | options)
    losses = Losses(config, "abc", 0, weights=weights)
    labels = functional.one_hot(LABELS, 3).float() if config.labels.multi else LABELS
    x, targets, criterion = losses.prepare(images(), labels, 0, 0)
    assert torch.equal(x, images())
    assert targets is labels
    assert losses.has_accuracy(0) != config.labels.multi
    assert losses.prepare(images(), labels, 0, 1)[2] is criterion
    logits = torch.randn(4, 3)
    if (weight := losses.weight_of([LABELS])) is not None:
        losses.begin_step(weight, 1)
    loss = criterion(logits, targets)
    torch.testing.assert_close(loss, expected(logits, labels), rtol=1e-5, atol=0)
    if weights is None:  # it is a mean over images, so that micro-batches add up
        halves = [criterion(logits[part], labels[part]) for part in (slice(2), slice(2, 4))]
        torch.testing.assert_close(loss, sum(halves) / 2)


@pytest.mark.parametrize(
    ("weights", "options", "expected"),
    [
        (
            None,
            {"loss": "one-vs-all", "bce_target_thresh": 0.2, "label_smoothing": 0.0},
            lambda logits, targets: binary(logits, (targets > 0.2).float()),
        ),
        (
            WEIGHTS,
            {},
            lambda x, y: -(WEIGHTS * y * x.log_softmax(1)).sum() / WEIGHTS[LABELS].sum(),
        ),
        (torch.full((3,), 100.0), {}, functional.cross_entropy),
    ],
)
def test_mixed_images_have_the_configured_loss(tiny, weights, options, expected):
    losses = Losses(tiny(mixup=0.4, mix_prob=1.0, **options), "abc", 0, weights=weights)
    _, targets, criterion = losses.prepare(images(), LABELS, 0, 0)
    if (weight := losses.weight_of([LABELS])) is not None:
        losses.begin_step(weight, 1)
    logits = torch.randn(4, 3)
    torch.testing.assert_close(criterion(logits, targets), expected(logits, targets))


@pytest.mark.parametrize("size", [64, 8, 4, 1])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_weighted_step_is_one_batch_however_it_is_divided(tiny, size, world_size, smoothing):
    config = tiny(mixup=0.0, label_smoothing=smoothing)
    losses = [Losses(config, "abc", rank, weights=WEIGHTS) for rank in range(world_size)]
    x, labels = torch.randn(64 * world_size, 5), torch.randint(3, (64 * world_size,))
    weight = torch.randn(3, 5)
    batches = [*zip(x.split(size), labels.split(size), strict=True)]
    per_process = 64 // size
    totals = [one.weight_of(each for _, each in batches) for one in losses]
    assert len({*totals}) == 1
    gradient, loss = torch.zeros(3, 5), 0.0
    for index, (inputs, targets) in enumerate(batches):
        one = losses[index // per_process]
        one.begin_step(totals[0], len(batches))
        own = weight.clone().requires_grad_()
        _, targets, criterion = one.prepare(torch.zeros(len(inputs), 3, 1, 1), targets, 0, index)
        value = criterion(inputs @ own.T, targets)
        (value / per_process).backward()  # as a step divides by its micro-batches
        gradient += own.grad / world_size  # as the mean over processes does
        loss += value.item() / len(batches)
    truth = weight.double().requires_grad_()
    reference = nn.CrossEntropyLoss(WEIGHTS.double(), label_smoothing=smoothing)
    expected = reference(x.double() @ truth.T, labels)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient.double(), truth.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mixup", [0.0, 0.2])
def test_micro_batches_do_not_change_a_run_with_class_weights(tiny, monkeypatch, tmp_path, mixup):
    """With mixup, equal weights change nothing."""
    make_without_norms(monkeypatch.setattr)
    path, rare = tmp_path / "weights.json", 100 if mixup else 1
    path.write_text(f'{{"blue": 100, "green": {rare}, "red": 100}}')
    plain = {"drop_rate": 0.0, "drop_path_rate": 0.0, "mixup": mixup, "epochs": 1}
    size, parts = (8, 1) if mixup else (13, 13)
    runs = [{"batch_size": size}, {"batch_size": size, "class_weights": str(path)}]
    runs += [{"batch_size": size // parts, "accumulate": parts, "class_weights": str(path)}]
    whole, weighted, divided = (
        rows_of(train(tiny(**plain, **run, name=str(index))).run_dir)[0]
        for index, run in enumerate(runs)
    )
    for name in ("loss", "val_loss"):
        one, other = (whole, weighted) if mixup else (weighted, divided)
        assert one[name] == pytest.approx(other[name], rel=1e-5)
        assert mixup or whole[name] != pytest.approx(weighted[name], rel=1e-3)


# Logits whose probabilities round to 0 or 1 in float32, and usual logits.
FAR = [-104.0, -60.0, -18.5, -5.0, -1.0, 0.0, 2.0, 5.0, 18.5, 60.0, 104.0]


@pytest.mark.parametrize("target", [0.0, 1.0])
@pytest.mark.parametrize(
    ("gamma_neg", "gamma_pos", "margin"),
    [(4.0, 1.0, 0.05), (0.0, 0.0, 0.0), (2.0, 3.0, 0.0), (0.5, 0.5, 0.0), (0.5, 0.5, 0.05)],
)
def test_the_asymmetric_loss_has_its_gradient_at_every_logit(gamma_neg, gamma_pos, margin, target):
    """Compare with the definition in exact arithmetic, up to logits whose probability rounds."""
    logits = torch.tensor([FAR], requires_grad=True)
    targets = torch.full_like(logits, target)
    loss = AsymmetricLoss(gamma_neg, gamma_pos, margin)(logits, targets)
    loss.backward()
    with mpmath.workdps(120):

        def exact(x):
            p = 1 / (1 + mpmath.exp(-x))
            if target:
                return -((1 - p) ** gamma_pos) * mpmath.log(p)
            p = p - margin
            return -(p**gamma_neg) * mpmath.log(1 - p) if p > 0 else mpmath.mpf(0)

        values = [float(exact(mpmath.mpf(x))) for x in FAR]
        slopes = [float(mpmath.diff(exact, mpmath.mpf(x))) for x in FAR]
    assert loss.item() == pytest.approx(sum(values), rel=1e-5)
    assert logits.grad[0].tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-30)


@pytest.mark.parametrize(("how", "smoothing"), [("mixup", 0.0), ("cutmix", 0.0), ("mixup", 0.2)])
def test_mixed_batches_have_labels_of_the_same_fractions_and_end_as_configured(
    tiny, how, smoothing
):
    alphas = {"mixup": 0.0, "cutmix": 0.0, how: 1.0}
    config = tiny(**alphas, mix_prob=1.0, label_smoothing=smoothing, epochs=3, mix_off_epochs=1)
    losses = Losses(config, "abcd", 0)
    plain = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 8, 8)
    seed_everything(5, ALONE.device)
    expected = draw()
    seed_everything(5, ALONE.device)
    x, targets, criterion = losses.prepare(plain.clone(), torch.arange(4), 1, 7)
    assert draw() == expected  # the global generators are left as found
    fraction = x[0].mean().item() / 3  # of the last image, all 3, in the first one, all 0
    assert 0 < fraction < 1
    expected = torch.tensor([1 - fraction, 0, 0, fraction]) * (1 - smoothing) + smoothing / 4
    torch.testing.assert_close(targets[0], expected)
    logits = torch.randn(4, 4)
    torch.testing.assert_close(
        criterion(logits, targets), functional.cross_entropy(logits, targets)
    )
    assert [losses.mixes(epoch) for epoch in range(3)] == [True, True, False]
    assert torch.equal(losses.prepare(plain.clone(), torch.arange(4), 2, 8)[0], plain)


@pytest.mark.parametrize("options", [{"mixup": 0.4, "mix_prob": 1.0}, {"reprob": 1.0}])
def test_each_process_and_step_draws_in_its_own_way_and_always_alike(tiny, options):
    def drawn(rank=0, step=0):
        losses = Losses(tiny(**{"mixup": 0.0} | options), "abc", rank)
        return losses.prepare(images(), LABELS, 0, step)[0]

    assert torch.equal(drawn(), drawn())
    for other in (drawn(rank=1), drawn(step=1), images()):
        assert not torch.equal(drawn(), other)


def test_a_reading_sums_up_names_the_first_bad_step_and_begins_anew():
    meter = LossMeter()
    logits = functional.one_hot(torch.tensor([0, 1, 0, 0]), 3).float()
    meter.add(1, torch.tensor(0.5), logits, LABELS)
    meter.add(2, torch.tensor(2.0), logits[:2], LABELS[:2])
    assert meter.read(ALONE) == (6, [2.0, 4.0], 4, None)
    assert meter.read(ALONE)[0] == 0
    for step, loss in ((3, 0.5), (4, -math.inf), (5, math.nan)):
        meter.add(step, torch.tensor(loss), logits, LABELS)
    assert meter.read(ALONE)[3] == 4


def dataset(targets, classes="abc"):
    several = isinstance(targets[0], list)
    indices = np.array(targets).nonzero()[1] if several else np.array(targets)
    ends = np.sum(targets, 1).cumsum() if several else None
    return ImageDataset("train", Paths([]), Labels((*classes,), indices, ends))


UNEQUAL = [0, 0, 0, 0, 1, 1, 2]
MANY = [[1, 0, 1], [1, 1, 0], [1, 0, 0], [0, 0, 1], [1, 0, 1]]


def test_class_weights_are_those_of_a_file_or_scikit_learns(tiny, tmp_path):
    class_weight = pytest.importorskip("sklearn.utils.class_weight")
    (tmp_path / "weights.json").write_text('{"c": 0.25, "a": 3, "b": 1}', encoding="utf-8-sig")
    found = class_weights(tiny(class_weights=str(tmp_path / "weights.json")), dataset(UNEQUAL))
    assert torch.equal(found, WEIGHTS)
    found = class_weights(tiny(class_weights="balanced"), dataset(UNEQUAL))
    expected = class_weight.compute_class_weight("balanced", classes=np.arange(3), y=UNEQUAL)
    assert found.tolist() == pytest.approx(expected.tolist())
    found = class_weights(tiny(class_weights="balanced", loss="bce"), dataset(MANY))
    for index, column in enumerate(np.array(MANY).T):
        without, having = class_weight.compute_class_weight(
            "balanced", classes=np.arange(2), y=column
        )
        assert found[index].item() == pytest.approx(having / without)
    assert class_weights(tiny(), dataset(UNEQUAL)) is None


@pytest.mark.parametrize(
    ("source", "options", "targets", "message"),
    [
        ("balanced", {}, [0, 0, 2], "expected images of each class in train, got none for b: give"),
        ("balanced", {"loss": "bce"}, [[1, 0, 1], [1, 1, 0]], "and without each .* none for a: g"),
        ("{", {}, UNEQUAL, "no readable JSON in .*weights.json"),
        ("[1, 2, 3]", {}, UNEQUAL, r"each of the data's classes \(a, b, c\) in .*, got list"),
        ('{"a": 1, "b": 2}', {}, UNEQUAL, r"classes \(a, b, c\) in .*, got a, b"),
        ('{"a": 1, "b": -2, "c": 1}', {}, UNEQUAL, "a finite number above 0 .*-2 for b"),
        ('{"a": 1, "b": true, "c": 1}', {}, UNEQUAL, "got True for b"),
        ('{"a": 1, "b": NaN, "c": 1}', {}, UNEQUAL, "got nan for b"),
        ('{"a": 1, "b": 1, "c": 0}', {}, UNEQUAL, "got 0 for c"),
    ],
)
def test_bad_class_weights_are_refused(tiny, tmp_path, source, options, targets, message):
    path = tmp_path / "weights.json"
    path.write_text(source)
    option = source if source == "balanced" else str(path)
    with pytest.raises(ConfigError, match=f"--class-weights.*{message}"):
        class_weights(tiny(class_weights=option, **options), dataset(targets))
