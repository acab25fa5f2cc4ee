"""The blur's kernels and the stem's against the plain operations."""

import pytest
import torch

from tests.ops.kernels import DEVICE, LAYOUTS, poisoned_memory  # noqa: F401
from tresnet.errors import InputError
from tresnet.ops.blur_pool import blur_pool
from tresnet.ops.blur_pool import launch as blur_launch
from tresnet.ops.blur_pool.cases import CASES
from tresnet.ops.space_to_depth import launch as stem_launch
from tresnet.ops.space_to_depth import stem_input

SMALL = {name: shape for name, shape in CASES.items() if name not in ("stage_2", "width_of_l")}
SMALL["many_channels"] = (1, 76, 4, 4)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [*((name, "nhwc") for name in SMALL), ("odd", "nchw"), ("smallest", "nchw")],
)
def test_blur_equals_the_definition_in_fp64(shape, layout):
    x = torch.randn(SMALL[shape]).to(DEVICE).to(memory_format=LAYOUTS[layout]).requires_grad_()
    exact = x.detach().double().requires_grad_()
    y, expected = blur_pool(x, impl="triton"), blur_pool(exact, impl="reference")
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-6)
    assert y.is_contiguous(memory_format=LAYOUTS[layout])
    grad = torch.randn(expected.shape, device=DEVICE)
    (ours,) = torch.autograd.grad(y, x, grad, create_graph=True)
    (theirs,) = torch.autograd.grad(expected, exact, grad.double())
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blur_to_a_single_pixel(layout):
    """What is written has its channels side by side in either layout, what is read has not."""
    x = torch.randn(2, 8, 2, 2, device=DEVICE).to(memory_format=LAYOUTS[layout])
    torch.testing.assert_close(blur_pool(x, impl="triton"), x.mean((2, 3), keepdim=True))


def test_blur_has_a_second_derivative():
    x = torch.randn(1, 2, 5, 4, device=DEVICE)
    grad = torch.randn(1, 2, 3, 2, device=DEVICE, requires_grad=True)
    y = blur_pool(x.requires_grad_(), impl="triton")
    (first,) = torch.autograd.grad(y, x, grad, create_graph=True)
    direction = torch.randn_like(first)
    (second,) = torch.autograd.grad(first, grad, direction)
    torch.testing.assert_close(second, blur_pool(direction, impl="reference"))


@pytest.mark.parametrize(
    ("channels", "block", "layout", "dtype"),
    [
        (3, 4, "nhwc", torch.float32),
        (3, 4, "nchw", torch.bfloat16),
        (1, 2, "nhwc", torch.bfloat16),
        (5, 3, "nchw", torch.float16),
        (5, 3, "nhwc", torch.float32),
    ],
)
def test_stem_reads_every_byte(channels, block, layout, dtype):
    images = torch.randint(256, (3, channels, 4 * block, 5 * block), dtype=torch.uint8)
    images = images.to(memory_format=LAYOUTS[layout])
    y = stem_input(images.to(DEVICE), block, dtype, impl="triton").cpu()
    assert y.dtype == dtype
    assert y.is_contiguous(memory_format=torch.channels_last)
    # by the definition on the CPU: a GPU divides by multiplying with the reciprocal
    plain = stem_input(images, block, dtype, impl="reference")
    # the interpreter truncates to bfloat16
    eps = torch.finfo(dtype).eps if (dtype, DEVICE) == (torch.bfloat16, "cpu") else 0
    for row in range(block):
        for column in range(block):
            first = (row * block + column) * channels
            pixels = images[:, :, row::block, column::block].float() / 255
            found = slice(None), slice(first, first + channels)
            torch.testing.assert_close(plain[found], pixels.to(dtype), rtol=0, atol=0)
            torch.testing.assert_close(y[found], pixels.to(dtype), rtol=eps, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("left", [3, 4])
def test_stem_reads_a_crop_without_a_copy(layout, left):
    """A row of the whole image has an odd number of bytes: no more than one can be read at once."""
    images = torch.randint(256, (2, 3, 20, 25), dtype=torch.uint8, device=DEVICE)
    crop = images.to(memory_format=LAYOUTS[layout])[:, :, 2:18, left : left + 16]
    ours = stem_input(crop, 4, torch.float32, impl="triton")
    expected = stem_input(crop.cpu().contiguous(), 4, torch.float32, impl="reference")
    assert torch.equal(ours.cpu(), expected)


@pytest.mark.parametrize(
    ("shape", "layout", "block", "together"),
    [
        ((2, 3, 16, 16), "nhwc", 4, 4),
        ((2, 3, 16, 16), "nchw", 4, 0),
        ((2, 3, 10, 10), "nhwc", 2, 2),
        ((2, 5, 9, 9), "nhwc", 3, 1),
        ((2, 1, 16, 16), "nchw", 4, 4),
    ],
)
def test_stem_reads_neighbours_together(shape, layout, block, together):
    images = torch.randint(256, shape, dtype=torch.uint8).to(memory_format=LAYOUTS[layout])
    assert stem_launch._run(images, block) == together
    ours = stem_input(images.to(DEVICE), block, torch.float32, impl="triton")
    assert torch.equal(ours.cpu(), stem_input(images, block, torch.float32, impl="reference"))


def test_stem_errors():
    images = torch.zeros(2, 3, 16, 18, dtype=torch.uint8)
    with pytest.raises(InputError, match=r"divisible by 4, got \(16, 18\): pad or resize"):
        stem_input(images, 4, torch.float32)
    with pytest.raises(InputError, match=r"expected uint8 images, got torch\.float32"):
        stem_input(images.float(), 4, torch.float32)


def test_operators_keep_their_promises():
    x = torch.randn(2, 5, 6, 7, device=DEVICE)
    images = torch.randint(256, (2, 3, 8, 12), dtype=torch.uint8, device=DEVICE)
    checks = ("test_schema", "test_faketensor")
    for layout in LAYOUTS.values():
        y = x.to(memory_format=layout)
        torch.library.opcheck(blur_launch.blur.recorded, (y,), test_utils=checks)
        torch.library.opcheck(blur_launch.transposed_blur.recorded, (y, 11, 14), test_utils=checks)
    torch.library.opcheck(
        stem_launch.stem_input.recorded, (images, 4, torch.float32), test_utils=checks
    )
