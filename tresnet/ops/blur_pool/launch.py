"""Launches of the blur and its transpose."""

import functools
from typing import Any

import torch
from torch import Tensor

from tresnet.ops.operators import launch, operator
from tresnet.ops.tiles import blurred, by_form, dense, geometry, memory_format, plan


@functools.cache
def _kernels() -> Any:
    from tresnet.ops.blur_pool import kernels

    return kernels


def _empty(x: Tensor, height: int, width: int) -> Tensor:
    size = (*x.shape[:2], height, width)
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=memory_format(x))


@by_form
def _cut(x: Tensor, height: int, width: int, transposed: bool) -> tuple[Any, ...]:
    """Programs, warps and the kernel's numbers for a dense `x` and an output of this size."""
    out = _empty(x, height, width)
    source, shape = geometry(x, whole_batch=False), geometry(out, whole_batch=False)
    small, large = (source, shape) if transposed else (shape, source)
    cut = plan(small, blur=True, writes=True, source=large)
    image = (*out.shape[2:], *x.shape[2:]) if transposed else (*x.shape[2:], width)
    numbers = small.p, shape.c, *image, *source.strides, *shape.strides, cut.splits, cut.chunk
    return (cut.programs, 1, 1), cut.warps, (*numbers, *cut.tile)


@operator(lambda x: _empty(x, *blurred(x.shape)))
def blur(x: Tensor) -> Tensor:
    """(N, C, H, W) to (N, C, ceil(H / 2), ceil(W / 2)), in the dtype and memory format of `x`."""
    x, size = dense(x), blurred(x.shape)
    grid, warps, numbers = _cut(x, *size, False)
    out = _empty(x, *size)
    launch(_kernels().blur, grid, warps, (x, out), numbers)
    return out


@operator(lambda grad, height, width: _empty(grad, height, width))
def transposed_blur(grad: Tensor, height: int, width: int) -> Tensor:
    """(N, C, ceil(height / 2), ceil(width / 2)) to (N, C, height, width)."""
    grad = dense(grad)
    grid, warps, numbers = _cut(grad, height, width, True)
    out = _empty(grad, height, width)
    launch(_kernels().transposed_blur, grid, warps, (grad, out), numbers)
    return out
