"""The operation concat(D P x - P x, L P x), where P, D and L are convolutions."""

from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tresnet.errors import InputError, check_known
from tresnet.ops.autocast import autocast_dtype
from tresnet.ops.dispatch import traced

Mode = Literal["branches", "composed", "recompute"]
MODES = ("branches", "composed", "recompute")


def subtracted_conv(
    x: Tensor,
    point: Tensor,
    depth: Tensor,
    low: Tensor,
    stride: int = 1,
    *,
    mode: Mode = "composed",
) -> Tensor:
    """Return concat(D P x - P x, L P x); `mode` decides which maps are saved for backward.

    With 'branches', three convolutions run, and x and P x are saved. With 'composed', only x is
    saved, and one k x k convolution runs. The convolution's weight is computed from P, D and L in
    forward and again in backward. With 'recompute', only x is saved. Three convolutions run in
    forward, and P and D run again in backward. Under `torch.compile`, export and tracing, the
    compiler decides what is saved, and 'recompute' does the same as 'branches'.

    Shapes: x (N, C, H, W), P = `point` (h, C, 1, 1), D = `depth` (h, 1, k, k) with k odd, L = `low`
    (h, h, k, k). Only P is strided. The result (N, 2 h, ceil(H / stride), ceil(W / stride)) has the
    dtype of the inputs, or of autocast.

    Raises:
        InputError: `mode` is unknown, or the weights do not fit the shape or dtype of `x`.
    """
    check_known("mode", mode, MODES)
    if x.dim() != 4 or x.shape[1] != point.shape[1]:
        raise InputError(
            f"subtracted_conv expected (N, {point.shape[1]}, H, W), got {tuple(x.shape)}"
        )
    if x.dtype != point.dtype and autocast_dtype(x.device.type) is None:
        raise InputError(f"subtracted_conv expected {point.dtype} as its weights, got {x.dtype}")
    run = composed if mode == "composed" else branches
    if mode == "branches" or traced() or not torch.is_grad_enabled():
        return run(x, point, depth, low, stride)
    # In backward, `checkpoint` reruns `run` only until the last convolution's inputs are restored.
    return cast(Tensor, checkpoint(run, x, point, depth, low, stride, use_reentrant=False))


def branches(x: Tensor, point: Tensor, depth: Tensor, low: Tensor, stride: int) -> Tensor:
    """Compute concat(D P x - P x, L P x) by three convolutions."""
    half, border = depth.shape[0], depth.shape[-1] // 2
    p = F.conv2d(x, point, stride=stride)
    d = F.conv2d(p, depth, padding=border, groups=half)
    d -= p
    return torch.cat((d, F.conv2d(p, low, padding=border)), dim=1)


def composed(x: Tensor, point: Tensor, depth: Tensor, low: Tensor, stride: int) -> Tensor:
    """Compute the result of `branches` by one convolution, with the weight of `compose`."""
    weight = compose(point, depth, low)
    step, padding, dilation = geometry(depth.shape[-1], stride)
    return F.conv2d(x, weight, None, step, padding, dilation)


def compose(point: Tensor, depth: Tensor, low: Tensor) -> Tensor:
    """Return the weight (2 h, C, k, k) of one convolution that replaces P, D and L.

    P is `point` (h, C, 1, 1), D is `depth` (h, 1, k, k) and L is `low` (h, h, k, k). The first h
    output channels are those of (D - 1) P, where 1 is the identity; the others are those of L P. P
    is a 1x1 convolution, so each weight of D - 1 and of L is multiplied by weights of P.
    """
    centre = depth.shape[-1] // 2
    impulse = torch.zeros_like(depth[:1])
    impulse[..., centre, centre] = 1
    lower = torch.einsum("omuv,mi->oiuv", low, point[:, :, 0, 0])
    return torch.cat(((depth - impulse) * point, lower), dim=0)


def geometry(kernel_size: int, stride: int) -> tuple[int, int, int]:
    """Return stride, padding and dilation of the convolution whose weight `compose` returns.

    Neighbours in P x are `stride` pixels of x apart, so the kernel is dilated. Padding x with zeros
    is exact: P of these zeros is 0, and D and L read zeros beyond the border of P x.
    """
    dilation = stride if kernel_size > 1 else 1
    return stride, dilation * (kernel_size // 2), dilation
