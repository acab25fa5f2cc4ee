"""Launch of the stem's kernel."""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from tresnet.ops.operators import launch, operator

BLOCK = 1024
WIDEST = 4  # values at once: bytes in, 8 or 16 out


@functools.cache
def _kernels() -> Any:
    from tresnet.ops.space_to_depth import kernels

    return kernels


def _run(x: Tensor, block_size: int) -> int:
    """Return how many values, 1, 2 or 4, are neighbours in `x` and in the output; else 0."""
    n_stride, c_stride, h_stride, w_stride = x.stride()
    channels = x.shape[1]
    if (c_stride != 1 and channels > 1) or w_stride != channels:
        return 0
    return math.gcd(block_size * channels, n_stride, h_stride, WIDEST)


def _empty(x: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    n, c, h, w = x.shape
    size = (n, h // block_size, w // block_size, block_size * block_size * c)
    return torch.empty(size, dtype=dtype, device=x.device).permute(0, 3, 1, 2)


@operator(_empty)
def stem_input(x: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    """Map bytes (N, C, H, W) of any strides to (N, b*b*C, H/b, W/b) in [0, 1], channels_last."""
    out = _empty(x, block_size, dtype)
    rows, width = out.shape[2], out.shape[1] * out.shape[3]
    numbers = *x.stride(), rows, width, x.shape[1], BLOCK, block_size, _run(x, block_size)
    grid = x.shape[0] * rows, -(-width // BLOCK), 1
    launch(_kernels().stem_input, grid, 4, (x, out), numbers)
    return out
