import random

import numpy as np
import pytest
import torch

from tresnet.data.mixup import Mixer
from tresnet.errors import ConfigError, InputError

TARGETS = torch.tensor([0, 1, 2, 3])


def batch() -> torch.Tensor:
    return torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 8, 8).clone()


def test_images_and_labels_are_mixed_by_the_same_share():
    images, targets = Mixer(4, mixup_alpha=1.0, label_smoothing=0.0)(batch(), TARGETS, step=3)
    share = targets[0, 0].item()
    assert 0 < share < 1
    torch.testing.assert_close(targets[0], torch.tensor([share, 0, 0, 1 - share]))
    torch.testing.assert_close(images[0], torch.full((3, 8, 8), 3 * (1 - share)))


def test_label_smoothing_spreads_its_mass():
    _, targets = Mixer(4, prob=0.0, label_smoothing=0.2)(batch(), TARGETS, step=0)
    torch.testing.assert_close(targets, torch.eye(4) * 0.8 + 0.05)


def test_cutmix_pastes_a_box_and_counts_its_pixels():
    mixer = Mixer(4, mixup_alpha=0.0, cutmix_alpha=1.0, label_smoothing=0.0)
    images, targets = mixer(batch(), TARGETS, step=1)
    pasted = (images[0, 0] == 3).float().mean().item()
    assert 0 < pasted < 1
    assert targets[0].tolist() == pytest.approx([1 - pasted, 0, 0, pasted])


def test_the_mix_depends_on_seed_and_step_alone():
    mixer = Mixer(4, seed=7)
    first = [mixer(batch(), TARGETS, step)[0] for step in range(5)]
    np.random.seed(99)  # noqa: NPY002
    again = Mixer(4, seed=7)
    assert torch.equal(again(batch(), TARGETS, 4)[0], first[4])
    assert not torch.equal(first[3], first[4])
    assert not torch.equal(Mixer(4, seed=8)(batch(), TARGETS, 4)[0], first[4])


def draw() -> tuple[float, float, float]:
    return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002


def test_the_global_generators_are_left_as_found():
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    expected = draw()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    Mixer(4, cutmix_alpha=1.0)(batch(), TARGETS, 0)
    assert draw() == expected


def test_an_odd_batch_and_an_idle_mixer_are_refused():
    with pytest.raises(InputError, match="even batch to mix in pairs, got 3 images"):
        Mixer(4)(batch()[:3], TARGETS[:3], 0)
    with pytest.raises(ConfigError, match=r"above 0, got 0\.0 and 0\.0"):
        Mixer(4, mixup_alpha=0.0)
