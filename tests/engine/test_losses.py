import math

import mpmath
import pytest
import torch
from timm.loss import AsymmetricLossMultiLabel
from torch import nn
from torch.nn import functional

from tests.engine.runs import ALONE, draw
from tresnet.engine.losses import AsymmetricLoss, Losses, LossMeter
from tresnet.engine.state import seed_everything

LABELS = torch.tensor([0, 1, 2, 1])


def images():
    return torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"label_smoothing": 0.3}, nn.CrossEntropyLoss(label_smoothing=0.3)),
        ({"loss": "bce"}, functional.binary_cross_entropy_with_logits),
        (
            {"loss": "asymmetric", "gamma_neg": 3.0, "prob_margin": 0.1},
            AsymmetricLossMultiLabel(gamma_neg=3, gamma_pos=1, clip=0.1),
        ),
    ],
)
def test_images_that_are_not_mixed_have_the_configured_loss(tiny, options, expected):
    losses = Losses(tiny(**{"mixup": 0.0, "label_smoothing": 0.0, **options}), "abc", 0)
    multi = "loss" in options
    labels = functional.one_hot(LABELS, 3).float() if multi else LABELS
    x, targets, criterion = losses.prepare(images(), labels, 0, 0)
    assert torch.equal(x, images())
    assert targets is labels
    assert losses.has_accuracy(0) != multi
    logits = torch.randn(4, 3)
    torch.testing.assert_close(criterion(logits, targets), expected(logits, labels))
    assert losses.prepare(images(), labels, 0, 1)[2] is criterion


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


def test_the_asymmetric_loss_is_timms_where_timms_is_exact():
    logits = 4 * torch.randn(64, 5, dtype=torch.float32)
    targets = (torch.rand(64, 5) < 0.4).float()
    for options in ((4, 1, 0.05), (2, 0, 0.2), (0, 0, 0)):
        ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        loss = AsymmetricLoss(*options)(ours, targets)
        expected = AsymmetricLossMultiLabel(*options)(theirs, targets)
        loss.backward()
        expected.backward()
        # timm's 1 - p rounds to a multiple of 6e-8
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("loss", ["cross-entropy", "one-vs-all", "bce", "asymmetric"])
def test_the_loss_is_a_mean_over_images_so_that_micro_batches_add_up(tiny, loss):
    criterion = Losses(tiny(loss=loss, mixup=0.0, label_smoothing=0.0), "abc", 0)._hard
    many, logits = loss in ("bce", "asymmetric"), torch.randn(4, 3)
    labels = functional.one_hot(LABELS, 3).float() if many else LABELS
    halves = [criterion(logits[part], labels[part]) for part in (slice(2), slice(2, 4))]
    torch.testing.assert_close(criterion(logits, labels), sum(halves) / 2)


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


def test_each_process_and_step_mixes_in_its_own_way_and_always_alike(tiny):
    def mixed(rank, step, mix_prob=1.0):
        losses = Losses(tiny(mixup=0.4, mix_prob=mix_prob), "abc", rank)
        return losses.prepare(images(), LABELS, 0, step)[0]

    assert torch.equal(mixed(0, 5), mixed(0, 5))
    assert not torch.equal(mixed(0, 5), mixed(1, 5))
    assert not torch.equal(mixed(0, 5), mixed(0, 6))
    assert torch.equal(mixed(0, 5, mix_prob=0.0), images())


def test_a_reading_sums_up_and_begins_anew():
    meter = LossMeter()
    logits = functional.one_hot(torch.tensor([0, 1, 0, 0]), 3).float()
    meter.add(1, torch.tensor(0.5), logits, LABELS)
    meter.add(2, torch.tensor(2.0), logits[:2], LABELS[:2])
    sums = meter.read(ALONE)
    assert (sums.images, sums.loss_sums, sums.hits, sums.first_bad) == (6, [2.0, 4.0], 4, None)
    assert meter.read(ALONE).images == 0


def test_the_first_step_with_a_bad_loss_is_named():
    meter = LossMeter()
    for update, loss in ((3, 0.5), (4, -math.inf), (5, math.nan)):
        meter.add(update, torch.tensor(loss), torch.zeros(4, 3), LABELS)
    assert meter.read(ALONE).first_bad == 4
