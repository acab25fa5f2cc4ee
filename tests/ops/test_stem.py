"""Space-to-depth against a pixel-by-pixel definition, which is that of timm's module."""

import pytest
import torch

from tresnet.errors import InputError
from tresnet.ops.stem import space_to_depth

# (N, C, H, W), block size
CASES = {
    "image_224": ((2, 3, 224, 224), 4),
    "non_square": ((3, 3, 32, 20), 4),
    "one_channel": ((1, 1, 8, 8), 4),
    "cifar_block_2": ((4, 3, 32, 32), 2),
    "odd_block": ((2, 5, 9, 6), 3),
}
LAYOUTS = [torch.contiguous_format, torch.channels_last]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["nchw", "nhwc"])
@pytest.mark.parametrize(("shape", "block"), CASES.values(), ids=CASES)
def test_moves_every_pixel(shape, block, layout, jit):
    x = torch.rand(shape).to(memory_format=layout)
    y = space_to_depth(x, block, jit=jit)
    channels = shape[1]
    assert channels == 1 or y.is_contiguous(memory_format=layout)
    assert y.shape == (shape[0], channels * block**2, shape[2] // block, shape[3] // block)
    for row in range(block):
        for column in range(block):
            first = (row * block + column) * channels
            expected = x[:, :, row::block, column::block]
            assert torch.equal(y[:, first : first + channels], expected)


def test_takes_bytes_and_views():
    x = torch.arange(2 * 3 * 8 * 16, dtype=torch.uint8).reshape(2, 3, 8, 16)[:, :, :, ::2]
    assert torch.equal(space_to_depth(x), space_to_depth(x.contiguous()))


def test_other_shapes_are_errors():
    with pytest.raises(InputError, match=r"divisible by 4, got \(225, 224\): pad or resize"):
        space_to_depth(torch.rand(1, 3, 225, 224))
    with pytest.raises(InputError, match=r"\(N, C, H, W\), got shape \(3, 8, 8\)"):
        space_to_depth(torch.rand(3, 8, 8))
