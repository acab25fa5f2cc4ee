"""Launches of the kernels of the mean of 2 x 2 squares, for maps of even height and width."""

import torch
from torch import Tensor

from tresnet.ops.launching import LaunchSpec, launch
from tresnet.ops.tiles import WARPS, cached_per_layout, divide, multiprocessors

RESIDENT = 8  # about as many programs as fit the registers of an H100's multiprocessor


def avg_pool(x: Tensor) -> Tensor:
    """Average 2 x 2 squares of pixels of a channels_last map."""
    n, c, h, w = x.shape
    layout = torch.channels_last
    out = torch.empty(n, c, h // 2, w // 2, dtype=x.dtype, device=x.device, memory_format=layout)
    launch(_spec(out, "avg_pool"), x=x, out=out)
    return out


def add_avg_pool_grad(grad_x: Tensor, grad: Tensor) -> Tensor:
    """Add the gradient of the pool's input to `grad_x`, in place."""
    launch(_spec(grad, "add_avg_pool_grad"), grad=grad, grad_x=grad_x)
    return grad_x


@cached_per_layout
def _spec(out: Tensor, kernel: str) -> LaunchSpec:
    """Return the `LaunchSpec` of a kernel for the pool's output, or for the output's gradient."""
    resident = multiprocessors(out.device) * RESIDENT
    tiling = divide(out, resident, per_sample=False, writes=True)
    scalars = {"WO": out.shape[3], **tiling._asdict()}
    return LaunchSpec(f"avg_pool.kernels.{kernel}", WARPS, (tiling.programs,), **scalars)
