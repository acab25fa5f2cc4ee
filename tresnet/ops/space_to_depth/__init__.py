"""Space-to-depth: blocks of pixels become channels."""

import torch
from torch import Tensor

from tresnet.errors import InputError
from tresnet.ops.scripted import scripted_if
from tresnet.ops.space_to_depth import launch, reference


def space_to_depth(x: Tensor, block_size: int = 4, *, jit: bool = False) -> Tensor:
    """Move each b x b block of pixels into the channels: (N, C, H, W) to (N, b*b*C, H/b, W/b).

    Channels are ordered (block row, block column, input channel). Dtype and memory format stay.
    `jit` runs the TorchScript form. Raises `InputError` if `x` has not four dimensions, or
    `block_size` does not divide H and W.
    """
    if not torch.jit.is_tracing():
        _check(x, block_size)
    return scripted_if(jit, reference.space_to_depth)(x, block_size)


def stem_input(x: Tensor, block_size: int, dtype: torch.dtype, *, kernels: bool) -> Tensor:
    """Turn images of bytes into the input of the stem's convolution.

    Maps (N, C, H, W), uint8 of any strides, to (N, b*b*C, H/b, W/b) in `dtype` and channels_last
    memory. Values are divided by 255, and ordered as by `space_to_depth`. With `kernels` one launch
    reads each byte once. Raises `InputError` if `x` is not uint8 or does not fit the block.
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
