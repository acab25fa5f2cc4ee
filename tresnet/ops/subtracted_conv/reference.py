"""Subtracted convolution in plain PyTorch: as three convolutions, and as one."""

import torch
import torch.nn.functional as F
from torch import Tensor


def branches(x: Tensor, point: Tensor, depth: Tensor, low: Tensor, stride: int) -> Tensor:
    """Return concat(D P x - P x, L P x) by three convolutions.

    Args:
        x: (N, C, H, W).
        point: P, (h, C, 1, 1), applied with `stride`.
        depth: D, (h, 1, k, k), depthwise, padded by k // 2.
        low: L, (h, h, k, k), padded by k // 2.
        stride: of P, in both directions.

    Returns:
        (N, 2 h, ceil(H / stride), ceil(W / stride)).
    """
    half, border = depth.shape[0], depth.shape[-1] // 2
    p = F.conv2d(x, point, stride=stride)
    d = F.conv2d(p, depth, padding=border, groups=half)
    d -= p
    return torch.cat((d, F.conv2d(p, low, padding=border)), dim=1)


def compose(point: Tensor, depth: Tensor, low: Tensor) -> Tensor:
    """Return the weight (2 h, C, k, k) of the one convolution; differentiable.

    (D - 1) P and L P, where 1 is the kernel that is one in its centre: P mixes channels alone, so
    each tap of the product is the product of that tap with P.
    """
    upper = high_pass(depth) * point
    lower = torch.einsum("omuv,mi->oiuv", low, point[:, :, 0, 0])
    return torch.cat((upper, lower), dim=0)


def high_pass(depth: Tensor) -> Tensor:
    """Return D - 1, (h, 1, k, k)."""
    centre = depth.shape[-1] // 2
    impulse = torch.zeros_like(depth[:1])
    impulse[..., centre, centre] = 1
    return depth - impulse


def geometry(kernel_size: int, stride: int) -> tuple[int, int, int]:
    """Return stride, padding and dilation of the one convolution.

    D and L read P x, whose neighbours lie `stride` pixels of x apart: the kernel is dilated. What
    they read beyond the border of P x is zero, and P of the zeros around x is zero too: exact.
    """
    dilation = stride if kernel_size > 1 else 1
    return stride, dilation * (kernel_size // 2), dilation


def composed(x: Tensor, point: Tensor, depth: Tensor, low: Tensor, stride: int) -> Tensor:
    """Return what `branches` does, by one convolution."""
    weight = compose(point, depth, low)
    step, padding, dilation = geometry(depth.shape[-1], stride)
    return F.conv2d(x, weight, None, step, padding, dilation)
