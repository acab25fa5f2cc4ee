import math

import pytest
import torch
from torch.nn import functional

from tresnet.engine.distributed import Processes
from tresnet.engine.losses import Losses, Tally

ALONE = Processes(0, 1, torch.device("cpu"))
LABELS = torch.tensor([0, 1, 2, 1])


def images():
    return torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(2))


def test_plain_labels_have_cross_entropy(tiny):
    losses = Losses(tiny(mixup=0.0, label_smoothing=0.0), 3, 0)
    x, targets, criterion = losses.prepare(images(), LABELS, 0, 0)
    assert torch.equal(x, images())
    logits = torch.randn(4, 3)
    torch.testing.assert_close(criterion(logits, targets), functional.cross_entropy(logits, LABELS))


def test_smoothed_labels_spread_their_mass(tiny):
    losses = Losses(tiny(mixup=0.0, label_smoothing=0.3), 3, 0)
    _, targets, criterion = losses.prepare(images(), LABELS, 0, 0)
    logits = torch.randn(4, 3)
    expected = functional.cross_entropy(logits, LABELS, label_smoothing=0.3)
    torch.testing.assert_close(criterion(logits, targets), expected)


def test_mixed_batches_have_mixed_labels_and_end_when_told_to(tiny):
    losses = Losses(tiny(mixup=0.4, mix_prob=1.0, epochs=3, mix_off_epochs=1), 3, 0)
    x, targets, criterion = losses.prepare(images(), LABELS, 1, 7)
    assert not torch.equal(x, images())
    torch.testing.assert_close(targets.sum(1), torch.ones(4))
    logits = torch.randn(4, 3)
    torch.testing.assert_close(
        criterion(logits, targets), functional.cross_entropy(logits, targets)
    )
    assert [losses.mixes(epoch) for epoch in range(3)] == [True, True, False]
    assert torch.equal(losses.prepare(images(), LABELS, 2, 8)[0], images())


def test_each_process_and_step_mixes_in_its_own_way_and_always_alike(tiny):
    def mixed(rank, step):
        losses = Losses(tiny(mixup=0.4, mix_prob=1.0), 3, rank)
        return losses.prepare(images(), LABELS, 0, step)[0]

    assert torch.equal(mixed(0, 5), mixed(0, 5))
    assert not torch.equal(mixed(0, 5), mixed(1, 5))
    assert not torch.equal(mixed(0, 5), mixed(0, 6))


def test_a_look_sums_up_and_begins_anew():
    tally = Tally()
    logits = functional.one_hot(torch.tensor([0, 1, 0, 0]), 3).float()
    tally.add(1, torch.tensor(0.5), logits, LABELS)
    tally.add(2, torch.tensor(2.0), logits[:2], LABELS[:2])
    look = tally.look(ALONE)
    assert (look.images, look.loss_sums, look.hits, look.first_bad) == (6, [2.0, 4.0], 4, None)
    assert tally.look(ALONE).images == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_update_with_a_bad_loss_is_named(value):
    tally = Tally()
    for update, loss in ((3, 0.5), (4, value), (5, value)):
        tally.add(update, torch.tensor(loss), torch.zeros(4, 3), LABELS)
    assert tally.look(ALONE).first_bad == 4
