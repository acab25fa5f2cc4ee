"""Squeeze and excitation between two passes over the maps, in plain PyTorch: see `launch`."""

import torch
import torch.nn.functional as F
from torch import Tensor


def forward(
    partial: Tensor,
    x: Tensor,
    stats: Tensor | None,
    bias: Tensor,
    linear: bool,
    blur: bool,
    fc1: Tensor,
    fc1_bias: Tensor,
    fc2: Tensor,
    fc2_bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the squeezed maps (N, C), the hidden layer (N, R) and the gate (N, C).

    `partial` (N, C) holds the means of the squeezed maps; if `linear`, the means of `x`, from
    which those of the normalised maps follow.
    """
    squeezed, dtype = partial, partial.dtype
    if linear and stats is not None:
        squeezed = (partial - stats[0]) * stats[1] + bias.to(dtype)
    hidden = torch.relu(F.linear(squeezed, fc1.flatten(1).to(dtype), fc1_bias.to(dtype)))
    gate = torch.sigmoid(F.linear(hidden, fc2.flatten(1).to(dtype), fc2_bias.to(dtype)))
    return squeezed, hidden, gate


def backward(
    partial: Tensor,
    stats: Tensor,
    bias: Tensor,
    gate: Tensor,
    squeezed: Tensor,
    hidden: Tensor,
    fc1: Tensor,
    fc1_bias: Tensor,
    fc2: Tensor,
    fc2_bias: Tensor,
    pixels: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradient of the squeeze over `pixels` (N, C), and those of the parameters."""
    dtype = partial.dtype
    grad = partial[:, 0] * bias.to(dtype) + partial[:, 1] * stats[1]
    grad = grad * gate * (1 - gate)
    inner = (grad @ fc2.flatten(1).to(dtype)) * (hidden > 0)
    return (
        inner @ fc1.flatten(1).to(dtype) / pixels,
        (inner.T @ squeezed).view_as(fc1).to(fc1.dtype),
        inner.sum(0).to(fc1_bias.dtype),
        (grad.T @ hidden).view_as(fc2).to(fc2.dtype),
        grad.sum(0).to(fc2_bias.dtype),
    )
