"""Space-to-depth: blocks of pixels become channels."""

import torch
from torch import Tensor

from tresnet.errors import InputError
from tresnet.ops.scripted import scripted_if
from tresnet.ops.space_to_depth import launch, reference


def space_to_depth(x: Tensor, block_size: int = 4, *, jit: bool = False) -> Tensor:
    """Move each b x b block of pixels into the channels: (N, C, H, W) to (N, b*b*C, H/b, W/b).

    Output channels are ordered (row in block, column in block, input channel). The output has the
    dtype and memory format of `x`. With `jit`, TorchScript compiles the function. Raises
    `InputError` unless `x` has four dimensions, and b = `block_size` divides H and W.
    """
    if not torch.jit.is_tracing():
        _check(x, block_size)
    return scripted_if(jit, reference.space_to_depth)(x, block_size)


def stem_input(x: Tensor, block_size: int, dtype: torch.dtype, *, kernels: bool) -> Tensor:
    """Return the input of the stem's convolution: `space_to_depth` of uint8 images / 255.

    `x` is (N, C, H, W) with any strides. The result is (N, b*b*C, H/b, W/b) in `dtype` and
    channels_last memory, with b = `block_size`. With `kernels`, a Triton kernel runs.
    Raises `InputError` unless `x` is uint8 with four dimensions, and `block_size` divides H and W.
    """
    if x.dtype != torch.uint8:
        raise InputError(f"stem_input expected uint8 images, got {x.dtype}")
    _check(x, block_size)
    return (launch if kernels and x.numel() else reference).stem_input(x, block_size, dtype)


def _check(x: Tensor, block_size: int) -> None:
    if x.dim() != 4:
        raise InputError(
            f"space_to_depth expected a batch of images (N, C, H, W), got shape {tuple(x.shape)}"
        )
    h, w = x.shape[-2:]
    if h % block_size or w % block_size:
        raise InputError(
            f"expected height and width divisible by {block_size}, got ({h}, {w}): pad or resize"
        )


__all__ = ["space_to_depth", "stem_input"]
