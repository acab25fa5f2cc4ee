"""Squeeze and excitation in plain PyTorch: the definitions of the functions of `launch`."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tresnet.ops import tiles
from tresnet.ops.abn.types import Kept, Norm, SEWeights


def forward(
    partial: Tensor, kept: Kept, norm: Norm, *, linear: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the squeezed maps (N, C), the hidden layer (N, R) and the gate (N, C).

    `partial` (N, C) holds the means of the maps to squeeze. With `linear`, `partial` holds the
    means of `kept.y`, and this function normalises them.
    """
    squeezed, dtype = partial, partial.dtype
    if linear and kept.stats is not None:
        squeezed = (partial - kept.stats[0]) * kept.stats[1] + norm.beta.to(dtype)
    fc1_weight, fc1_bias, fc2_weight, fc2_bias = _matrices(norm, dtype)
    hidden = torch.relu(F.linear(squeezed, fc1_weight, fc1_bias))
    return squeezed, hidden, torch.sigmoid(F.linear(hidden, fc2_weight, fc2_bias))


def _matrices(norm: Norm, dtype: torch.dtype) -> SEWeights:
    assert norm.se is not None
    fc1_weight, fc1_bias, fc2_weight, fc2_bias = (part.to(dtype) for part in norm.se)
    return SEWeights(fc1_weight.flatten(1), fc1_bias, fc2_weight.flatten(1), fc2_bias)


def backward(partial: Tensor, kept: Kept, norm: Norm) -> tuple[Tensor, SEWeights]:
    """Return `Sums.squeeze_grad` (N, C), and the gradients of the SE's weights and biases."""
    gate = kept.gate if kept.excited is None else kept.excited
    assert kept.stats is not None
    assert gate is not None
    assert kept.squeezed is not None
    assert kept.hidden is not None
    assert norm.se is not None
    se, pixels = _matrices(norm, partial.dtype), kept.y[0, 0].numel()
    if norm.blur:
        pixels = math.prod(tiles.blurred(kept.y.shape))
    grad = partial[:, 0] * norm.beta.to(partial.dtype) + partial[:, 1] * kept.stats[1]
    grad = grad * gate * (1 - gate)
    inner = (grad @ se.fc2_weight) * (kept.hidden > 0)
    grads = inner.T @ kept.squeezed, inner.sum(0), grad.T @ kept.hidden, grad.sum(0)
    return inner @ se.fc1_weight / pixels, SEWeights(
        *(found.view_as(part).to(part.dtype) for found, part in zip(grads, norm.se, strict=True))
    )
