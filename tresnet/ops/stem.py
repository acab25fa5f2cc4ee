"""The stem's input: uint8 images divided by 255, and blocks of pixels moved into the channels."""

import math

import torch
from torch import Tensor

from tresnet.errors import InputError
from tresnet.ops.launching import LaunchSpec, launch
from tresnet.ops.scripted import scripted_if
from tresnet.ops.tiles import cached_per_layout, dense
from tresnet.ops.unit_floats import unit_floats

BLOCK = 1024  # values that a program of the kernel writes
WIDEST = 4  # most values that a thread copies at once: 4 bytes of input, 8 or 16 of output


def space_to_depth(x: Tensor, block_size: int = 4, *, jit: bool = False) -> Tensor:
    """Move each b x b block of pixels into the channels: (N, C, H, W) to (N, b*b*C, H/b, W/b).

    Output channels are ordered (row in block, column in block, input channel). The output has the
    dtype and memory format of `x`. With `jit`, TorchScript compiles the function. Raises
    `InputError` unless `x` has four dimensions, and b = `block_size` divides H and W.
    """
    if not torch.jit.is_tracing():
        check_blocks(x, block_size)
    return scripted_if(jit, blocks_to_channels)(x, block_size)


def blocks_to_channels(x: Tensor, block_size: int) -> Tensor:
    """Compute `space_to_depth` (section 2.1 of TResNet's paper) without checks.

    Output channels are ordered (row, column, input channel), as the published weights expect.
    `torch.nn.functional.pixel_unshuffle` orders channels (input channel, row, column).
    """
    n, c, h, w = x.shape
    rows, columns = h // block_size, w // block_size
    pixels = x.permute(0, 2, 3, 1)
    nhwc = pixels.is_contiguous() and not x.is_contiguous()
    blocks = pixels.reshape(n, rows, block_size, columns, block_size, c)
    if nhwc:
        blocks = blocks.permute(0, 1, 3, 2, 4, 5)
        return blocks.reshape(n, rows, columns, block_size * block_size * c).permute(0, 3, 1, 2)
    blocks = blocks.permute(0, 2, 4, 5, 1, 3)
    return blocks.reshape(n, block_size * block_size * c, rows, columns)


def stem_input(x: Tensor, block_size: int, dtype: torch.dtype, *, kernels: bool) -> Tensor:
    """Return the input of the stem's convolution: `space_to_depth` of uint8 images / 255.

    `x` is (N, C, H, W). The result is (N, b*b*C, H/b, W/b) in `dtype` and channels_last memory,
    with b = `block_size`, which divides H and W. With `kernels`, a Triton kernel runs.
    """
    if kernels:
        return input_by_kernel(dense(x), block_size, dtype)
    return dense(unit_floats(blocks_to_channels(dense(x), block_size), dtype=dtype))


def input_by_kernel(x: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    """Compute `stem_input` of channels_last images by a Triton kernel."""
    n, c, h, w = x.shape
    size = n, h // block_size, w // block_size, block_size * block_size * c
    out = torch.empty(size, dtype=dtype, device=x.device)
    launch(_stem(x, block_size), x=x, out=out)
    return out.permute(0, 3, 1, 2)


@cached_per_layout
def _stem(x: Tensor, block_size: int) -> LaunchSpec:
    n, c, h, w = x.shape
    width = w * block_size * c
    return LaunchSpec(
        "stem_kernel.stem_input", 4, (n * h // block_size, -(-width // BLOCK)), WIDTH=width, C=c,
        BLOCK=BLOCK, B=block_size, RUN=math.gcd(block_size * c, WIDEST),
    )  # fmt: skip


def check_blocks(x: Tensor, block_size: int) -> None:
    """Raise `InputError` unless `x` is (N, C, H, W) with H and W divisible by `block_size`."""
    if x.dim() != 4:
        raise InputError(
            f"space_to_depth expected a batch of images (N, C, H, W), got shape {tuple(x.shape)}"
        )
    h, w = x.shape[-2:]
    if h % block_size or w % block_size:
        raise InputError(
            f"expected height and width divisible by {block_size}, got ({h}, {w}): pad or resize"
        )
