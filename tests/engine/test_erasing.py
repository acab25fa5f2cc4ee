"""Random erasing against timm's, whose rectangles it draws."""

import random

import pytest
import torch
from timm.data.random_erasing import RandomErasing as TimmErasing

from tresnet.engine.erasing import erasings
from tresnet.engine.losses import Losses
from tresnet.settings import Augment

LAYOUTS = (torch.contiguous_format, torch.channels_last)


CASES = {
    "erasing": ({"reprob": 0.6, "recount": 1}, {}),
    "three": ({"reprob": 0.6, "recount": 3}, {"max_count": 3}),
    "cutout": ({"cutout_prob": 0.6}, {"min_area": 0.25, "max_area": 0.25, "min_aspect": 1.0}),
    "cutout of any shape": (
        {"cutout_prob": 0.6, "cutout_area": (0.02, 0.4), "cutout_min_aspect": 0.5},
        {"min_area": 0.02, "max_area": 0.4, "min_aspect": 0.5},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("height", "width"), [(24, 40), (5, 4)])
def test_rectangles_and_black_are_timms(case, height, width):
    ours, timms = CASES[case]
    images = torch.rand(64, 3, height, width)
    random.seed(5)
    expected = TimmErasing(0.6, mode="const", device="cpu", **timms)(images.clone())
    (erasing,) = erasings(Augment(remode="const", **ours))
    assert torch.equal(erasing(images, 5), expected)
    assert not torch.equal(expected, images)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("remode", ["rand", "pixel"])
def test_noise_is_timms_in_the_units_of_the_images(remode, dtype, layout):
    """Undo the normalisation by ImageNet's mean and deviation; half the values are not clamped."""
    high = 255 if dtype == torch.uint8 else 1
    images = torch.full((400, 3, 16, 16), high / 2).to(dtype).to(memory_format=layout)
    before = images.clone()
    found = erasings(Augment(reprob=1.0, remode=remode))[0](images, 5)
    assert torch.equal(images, before)
    assert (found.dtype, found.is_contiguous(memory_format=layout)) == (dtype, True)
    random.seed(5)
    mask = TimmErasing(1.0, mode="const", device="cpu")(torch.ones(400, 1, 16, 16)) == 0
    assert torch.equal(found != before, mask.expand_as(found) & (found != before))
    erased = (found.float() / high).permute(1, 0, 2, 3)[:, mask[:, 0]]
    assert 0 <= erased.min() < erased.max() <= 1
    # One colour a rectangle: 400 values a channel, whose mean is known within 0.23 / 20.
    torch.testing.assert_close(
        erased.median(1).values, torch.tensor([0.485, 0.456, 0.406]), rtol=0, atol=0.06
    )
    first = found[0, 0][mask[0, 0]]
    assert (len(first.unique()) == 1) == (remode == "rand")


@pytest.mark.parametrize("option", ["reprob", "cutout_prob"])
def test_a_batch_is_erased_before_it_is_mixed(option, tiny):
    images, labels, black = torch.rand(8, 3, 12, 12), torch.arange(8) % 3, []
    for alpha in (0.0, 1.0):
        config = tiny(mixup=alpha, mix_prob=1.0, remode="const", **{option: 1.0})
        found, _, _ = Losses(config, "abc", 0).prepare(images.clone(), labels, 0, 0)
        black.append((found == 0).sum())
    assert black[0] > black[1]  # where both of a pair are erased
