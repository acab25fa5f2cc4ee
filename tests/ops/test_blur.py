"""The blur against timm's module, forward and backward."""

import functools

import pytest
import torch

from tresnet.errors import InputError
from tresnet.ops.blur import blur_pool

# (N, C, H, W)
CASES = {
    "stage_2": (2, 128, 56, 56),
    "odd": (2, 3, 7, 5),
    "non_square": (1, 8, 12, 6),
    "smallest": (1, 1, 2, 2),
    "one_row_out": (3, 2, 2, 9),
    "width_of_l": (1, 76, 14, 14),
}
LAYOUTS = [torch.contiguous_format, torch.channels_last]


def timm_blur(x):
    from timm.layers import BlurPool2d

    return BlurPool2d(x.shape[1], filt_size=3, stride=2).to(x.dtype)(x)


FORMS = {
    "plain": blur_pool,
    "scripted": functools.partial(blur_pool, jit=True),
    "compiled": torch.compile(blur_pool, backend="aot_eager", dynamic=True),
}


@pytest.mark.parametrize(
    ("form", "shape", "layout"),
    [
        *(("plain", shape, layout) for shape in CASES for layout in (0, 1)),
        *(("scripted", "odd", layout) for layout in (0, 1)),
        *(("compiled", shape, 0) for shape in ("odd", "non_square")),
    ],
)
def test_equals_timm_forward_and_backward(form, shape, layout):
    x = torch.randn(CASES[shape], dtype=torch.float64).to(memory_format=LAYOUTS[layout])
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = FORMS[form](ours), timm_blur(theirs)
    torch.testing.assert_close(y, expected)
    grad = torch.randn_like(expected)
    y.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(ours.grad, theirs.grad)
    for made in (y, ours.grad):
        assert made.is_contiguous(memory_format=LAYOUTS[layout])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_that_of_one_rounding(dtype):
    x = torch.randn(2, 5, 9, 8).to(dtype)
    truth = blur_pool(x.double())
    # Weights are exact and sum to one, so only accumulation and the last rounding lose anything.
    bound = 2 * torch.finfo(dtype).eps * x.abs().max().item()
    assert (blur_pool(x).double() - truth).abs().max().item() <= bound


@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (1, 1, 8, 1), (3, 8, 8)])
def test_bad_input_is_an_error(shape):
    with pytest.raises(InputError, match="H and W at least 2"):
        blur_pool(torch.rand(shape))
