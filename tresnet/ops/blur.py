"""Anti-aliased downsampling: 3x3 binomial blur with stride 2 (Zhang 2019, arXiv 1904.11486)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tresnet.errors import InputError
from tresnet.ops.scripted import scripted_if


def blur_pool(x: Tensor, *, jit: bool = False) -> Tensor:
    """Blur with the 3x3 binomial filter, reflecting the border, and keep every second pixel.

    `x` (N, C, H, W) is floating point. The result is (N, C, ceil(H / 2), ceil(W / 2)).
    Raises `InputError` if H or W is 1, because the border cannot be reflected. With `jit`,
    TorchScript compiles the function.
    """
    if not torch.jit.is_tracing():
        check_shape(x)
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        return blur_by_slices(x)
    return scripted_if(jit, blur_by_convolution)(x)


def check_shape(x: Tensor) -> None:
    """Raise `InputError` unless `x` is (N, C, H, W) with H and W of at least 2."""
    if x.dim() != 4 or min(x.shape[-2:]) < 2:
        raise InputError(
            f"blur_pool expected (N, C, H, W) with H and W at least 2, got {tuple(x.shape)}: "
            "use larger images"
        )


def binomial_filter(x: Tensor) -> Tensor:
    """Return the outer product of [1, 2, 1] / 4 with itself, for each channel of `x`: (C, 1, 3, 3).

    Each call computes the filter on the device of `x`. So CUDA graphs can capture the call, and a
    model built on the meta device has no buffer to initialise. The values are exact in 16 bits.
    """
    row = (2 - torch.arange(-1, 2, device=x.device).abs()).to(x.dtype) / 4
    return (row[:, None] * row[None, :]).expand(x.shape[1], 1, 3, 3)


def blur_by_convolution(x: Tensor) -> Tensor:
    """Compute `blur_pool` by a depthwise convolution."""
    padded = F.pad(x, [1, 1, 1, 1], mode="reflect")
    return F.conv2d(padded, binomial_filter(x), stride=2, groups=x.shape[1])


def blur_by_slices(x: Tensor) -> Tensor:
    """Compute `blur_pool` by sums of strided slices, which `torch.compile` fuses with other code.

    A compiled depthwise convolution would be a separate kernel, on a padded copy of `x`.
    """
    y = F.pad(x, [1, 1, 1, 1], mode="reflect")
    for dim in (2, 3):
        size = 2 * ((x.shape[dim] + 1) // 2)
        first, centre, last = (
            y[:, :, start : start + size - 1 : 2]
            if dim == 2
            else y[:, :, :, start : start + size - 1 : 2]
            for start in range(3)
        )
        y = 0.25 * (first + last) + 0.5 * centre
    return y
