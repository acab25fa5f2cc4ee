"""Gradient of the blur: the operation is linear, so nothing is saved for backward."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tresnet.ops.autocast import autocast_off
from tresnet.ops.blur_pool.reference import binomial_filter

Blur = Callable[[Tensor], Tensor]
Transpose = Callable[[Tensor, int, int], Tensor]


def transposed_blur_pool(grad: Tensor, height: int, width: int) -> Tensor:
    """Apply the transpose of `blur_pool`.

    Args:
        grad: (N, C, ceil(height / 2), ceil(width / 2)), floating point.
        height: height of the input of the forward operation.
        width: width of the input of the forward operation.

    Returns:
        (N, C, height, width) in the dtype of `grad`.
    """
    rows = height + 2 - (2 * grad.shape[2] + 1)
    columns = width + 2 - (2 * grad.shape[3] + 1)
    padded = F.conv_transpose2d(
        grad, binomial_filter(grad), stride=2, output_padding=(rows, columns), groups=grad.shape[1]
    )
    # The reflected border returns to the pixels it was copied from: rows first, then columns.
    padded[:, :, 2] += padded[:, :, 0]
    padded[:, :, height - 1] += padded[:, :, height + 1]
    padded[:, :, :, 2] += padded[:, :, :, 0]
    padded[:, :, :, width - 1] += padded[:, :, :, width + 1]
    return padded[:, :, 1:-1, 1:-1].contiguous(memory_format=memory_format_of(grad))


def memory_format_of(x: Tensor) -> torch.memory_format:
    """Return channels_last for a (N, C, H, W) tensor laid out so, else contiguous."""
    nhwc = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if nhwc else torch.contiguous_format


class BlurPool(torch.autograd.Function):
    """The blur with its transpose as gradient; each a function of one implementation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blur: Blur, transpose: Transpose) -> Tensor:
        """Blur `x` by `blur`: (N, C, H, W) to (N, C, ceil(H / 2), ceil(W / 2))."""
        ctx.size, ctx.functions = x.shape[2:], (blur, transpose)
        with autocast_off(x.device.type):
            return blur(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, None, None]:
        """Apply the transpose."""
        return TransposedBlurPool.apply(grad_outputs[0], *ctx.size, *ctx.functions), None, None


class TransposedBlurPool(torch.autograd.Function):
    """The transpose of the blur, itself differentiable, so that second derivatives work."""

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, height: int, width: int, blur: Blur, transpose: Transpose
    ) -> Tensor:
        """Apply the transpose: (N, C, ceil(H / 2), ceil(W / 2)) to (N, C, H, W)."""
        ctx.functions = (blur, transpose)
        with autocast_off(grad.device.type):
            return transpose(grad, height, width)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        """Apply the blur."""
        return BlurPool.apply(grad_outputs[0], *ctx.functions), None, None, None, None
