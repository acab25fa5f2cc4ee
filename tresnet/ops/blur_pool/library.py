"""The blur's kernels as operators of PyTorch."""

import functools
from typing import Any

import torch
from torch import Tensor

from tresnet.ops.tiles import (
    blurred,
    dense,
    device_of,
    geometry,
    memory_format,
    plan,
)


@functools.cache
def _kernels() -> Any:
    from tresnet.ops.blur_pool import kernels

    return kernels


def _empty(x: Tensor, height: int, width: int) -> Tensor:
    size = (*x.shape[:2], height, width)
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=memory_format(x))


@torch.library.custom_op("tresnet::blur_pool", mutates_args=())
def blur_pool(x: Tensor) -> Tensor:
    """(N, C, H, W) to (N, C, ceil(H / 2), ceil(W / 2)), in the dtype and memory format of `x`."""
    x = dense(x)
    out = _empty(x, *blurred(x.shape))
    source, shape = geometry(x, whole_batch=False), geometry(out, whole_batch=False)
    cut = plan(shape, blur=True, writes=True, source=source)
    with device_of(x):
        _kernels().blur[(cut.programs,)](
        x, out, shape.p, shape.c, x.shape[2], x.shape[3], out.shape[3], *source.strides,
        *shape.strides, cut.splits, cut.chunk, **cut.options,
    )  # fmt: skip
    return out


@blur_pool.register_fake
def _(x: Tensor) -> Tensor:
    return _empty(x, *blurred(x.shape))


@torch.library.custom_op("tresnet::transposed_blur_pool", mutates_args=())
def transposed_blur_pool(grad: Tensor, height: int, width: int) -> Tensor:
    """(N, C, ceil(height / 2), ceil(width / 2)) to (N, C, height, width)."""
    grad = dense(grad)
    out = _empty(grad, height, width)
    source, shape = geometry(grad, whole_batch=False), geometry(out, whole_batch=False)
    cut = plan(source, blur=True, writes=True, source=shape)
    with device_of(grad):
        _kernels().transposed_blur[(cut.programs,)](
        grad, out, source.p, shape.c, height, width, *grad.shape[2:], *source.strides,
        *shape.strides, cut.splits, cut.chunk, **cut.options,
    )  # fmt: skip
    return out


@transposed_blur_pool.register_fake
def _(grad: Tensor, height: int, width: int) -> Tensor:
    return _empty(grad, height, width)
