"""Means of 2 x 2 squares of pixels, before the convolution of a shortcut with stride 2.

Kernels run for an even height and width, where each square has four pixels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tresnet.ops.launching import LaunchSpec, launch
from tresnet.ops.tiles import WARPS, cached_per_layout, divide, multiprocessors

RESIDENT = 8  # about as many programs as fit the registers of an H100's multiprocessor


def avg_pool(x: Tensor) -> Tensor:
    """Average 2 x 2 squares of pixels of a channels_last map.

    `x` is (N, C, H, W) and not empty; the result is (N, C, ceil(H / 2), ceil(W / 2)) in its dtype
    and memory format. If H or W is odd, squares at the border have fewer pixels.
    """
    n, c, h, w = x.shape
    if h % 2 or w % 2:
        return plain_avg_pool(x)
    out = x.new_empty(n, h // 2, w // 2, c).permute(0, 3, 1, 2)
    launch(_spec(out, "avg_pool"), x=x, out=out)
    return out


def plain_avg_pool(x: Tensor) -> Tensor:
    """Compute `avg_pool` by PyTorch's operator."""
    return F.avg_pool2d(x, 2, 2, ceil_mode=True, count_include_pad=False)


def add_avg_pool_grad(grad_x: Tensor, grad: Tensor) -> Tensor:
    """Add the gradient of `x` in `avg_pool(x)` to `grad_x`, in place; return `grad_x`.

    `grad` is the gradient of the pool's output. It has the dtype of `grad_x`, and both are
    channels_last.
    """
    if grad_x.shape[2] % 2 or grad_x.shape[3] % 2:
        return plain_add_avg_pool_grad(grad_x, grad)
    launch(_spec(grad, "add_avg_pool_grad"), grad=grad, grad_x=grad_x)
    return grad_x


def plain_add_avg_pool_grad(grad_x: Tensor, grad: Tensor) -> Tensor:
    """Compute `add_avg_pool_grad` by PyTorch's operators."""
    settings = [2, 2], [2, 2], [0, 0], True, False, None
    # the operator reads only the shape of the pool's input, which is that of its gradient
    return grad_x.add_(torch.ops.aten.avg_pool2d_backward(grad, grad_x, *settings))


@cached_per_layout
def _spec(out: Tensor, kernel: str) -> LaunchSpec:
    """Return the `LaunchSpec` of a kernel for the pool's output, or for the output's gradient."""
    resident = multiprocessors(out.device) * RESIDENT
    tiling = divide(out, resident, per_sample=False, writes=True)
    scalars = {"WO": out.shape[3], **tiling._asdict()}
    return LaunchSpec(f"pool_kernels.{kernel}", WARPS, (tiling.programs,), **scalars)
