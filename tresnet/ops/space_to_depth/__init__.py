"""Space-to-depth: blocks of pixels become channels."""

import torch
from torch import Tensor

from tresnet.errors import InputError
from tresnet.ops.scripted import scripted_if
from tresnet.ops.space_to_depth import launch, reference


def space_to_depth(x: Tensor, block_size: int = 4, *, jit: bool = False) -> Tensor:
    """Move each `block_size` x `block_size` block of pixels into the channels.

    Args:
        x: (N, C, H, W), any dtype; H and W divisible by `block_size`.
        block_size: side of the square block.
        jit: run the TorchScript form.

    Returns:
        (N, block_size**2 * C, H / block_size, W / block_size), channels ordered
        (block row, block column, input channel), in the memory format of `x`.

    Raises:
        InputError: `x` has not four dimensions, or H or W is not divisible by `block_size`.
    """
    if not torch.jit.is_tracing():
        _check(x, block_size)
    return scripted_if(jit, reference.space_to_depth)(x, block_size)


def stem_input(x: Tensor, block_size: int, dtype: torch.dtype, *, kernels: bool) -> Tensor:
    """Turn images of bytes into the input of the stem's convolution.

    Args:
        x: (N, C, H, W), uint8, any strides; H and W divisible by `block_size`.
        block_size: Side of the square block.
        dtype: Floating-point type of the result.
        kernels: Run one kernel that reads each byte once and writes each value once, else plain
            PyTorch.

    Returns:
        (N, block_size**2 * C, H / block_size, W / block_size), the values over 255, ordered as
        `space_to_depth` does, in channels_last memory.

    Raises:
        InputError: `x` is not uint8 or does not fit the block.
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
