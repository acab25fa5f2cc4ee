"""Launches of the blur and its transpose."""

import functools
from typing import Any

import torch
from torch import Tensor

from tresnet.ops.operators import operator
from tresnet.ops.tiles import blurred, dense, geometry, memory_format, plan


@functools.cache
def _kernels() -> Any:
    from tresnet.ops.blur_pool import kernels

    return kernels


def _empty(x: Tensor, height: int, width: int) -> Tensor:
    size = (*x.shape[:2], height, width)
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=memory_format(x))


@operator(lambda x: _empty(x, *blurred(x.shape)))
def blur(x: Tensor) -> Tensor:
    """(N, C, H, W) to (N, C, ceil(H / 2), ceil(W / 2)), in the dtype and memory format of `x`."""
    x = dense(x)
    out = _empty(x, *blurred(x.shape))
    source, shape = geometry(x, whole_batch=False), geometry(out, whole_batch=False)
    cut = plan(shape, blur=True, writes=True, source=source)
    _kernels().blur[(cut.programs,)](
        x, out, shape.p, shape.c, x.shape[2], x.shape[3], out.shape[3], *source.strides,
        *shape.strides, cut.splits, cut.chunk, **cut.options,
    )  # fmt: skip
    return out


@operator(lambda grad, height, width: _empty(grad, height, width))
def transposed_blur(grad: Tensor, height: int, width: int) -> Tensor:
    """(N, C, ceil(height / 2), ceil(width / 2)) to (N, C, height, width)."""
    grad = dense(grad)
    out = _empty(grad, height, width)
    source, shape = geometry(grad, whole_batch=False), geometry(out, whole_batch=False)
    cut = plan(source, blur=True, writes=True, source=shape)
    _kernels().transposed_blur[(cut.programs,)](
        grad, out, source.p, shape.c, height, width, *grad.shape[2:], *source.strides,
        *shape.strides, cut.splits, cut.chunk, **cut.options,
    )  # fmt: skip
    return out
