"""The kernels of the shortcuts' average pool against PyTorch's operators in fp64."""

import pytest
import torch
import torch.nn.functional as F

from tests.ops.kernels import DEVICE, poisoned_memory  # noqa: F401
from tresnet.ops import pool as op
from tresnet.ops import tiles
from tresnet.ops.epilogue import definition

# (N, C, H, W): odd sizes are PyTorch's own, and so are the last squares
SHAPES = [(2, 16, 6, 8), (3, 5, 4, 2), (1, 83, 2, 2), (1, 1, 4, 6), (2, 6, 7, 4), (2, 3, 1, 1)]


@pytest.mark.parametrize("tile", [tiles.TILE, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_pytorch_in_fp64(shape, dtype, tile, monkeypatch):
    """A result in 16 bits is rounded once, or truncated by the interpreter."""
    monkeypatch.setattr(tiles, "_specs", {})
    monkeypatch.setattr(tiles, "TILE", tile)
    n, c, h, w = shape
    sizes = shape, (n, c, -(-h // 2), -(-w // 2)), shape
    x, grad, grad_x = (
        torch.randn(size).to(DEVICE, dtype, memory_format=torch.channels_last) for size in sizes
    )
    exact = x.double().requires_grad_()
    expected = F.avg_pool2d(exact, 2, 2, ceil_mode=True, count_include_pad=False)
    (expected_grad,) = torch.autograd.grad(expected, exact, grad.double())
    expected_grad = expected_grad + grad_x.double()
    for ops in (op, definition):
        total = grad_x.clone()
        y, same = ops.avg_pool(x), ops.add_avg_pool_grad(total, grad)
        assert same is total
        for result, value in ((y, expected), (total, expected_grad)):
            assert result.is_contiguous(memory_format=torch.channels_last)
            assert result.dtype == dtype
            allowed = torch.finfo(dtype).eps * (value.abs() + 1)
            assert ((result.double() - value).abs() <= allowed).all()
