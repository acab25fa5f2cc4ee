"""Squeeze and excitation in plain PyTorch: the definitions of the functions of `launch`."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tresnet.ops import tiles
from tresnet.ops.abn.types import Norm, Saved, SEWeights


def forward(
    sums: tuple[Tensor], saved: Saved, norm: Norm, *, linear: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the squeezed maps (N, C), the hidden layer (N, R) and the gate (N, C).

    `sums` holds the means (N, C) of the maps to squeeze. With `linear`, these are the means
    of `saved.y`, and this function normalises them.
    """
    (squeezed,) = sums
    dtype = squeezed.dtype
    if linear and saved.stats is not None:
        squeezed = (squeezed - saved.stats[0]) * saved.stats[1] + norm.beta.to(dtype)
    fc1_weight, fc1_bias, fc2_weight, fc2_bias = _matrices(norm, dtype)
    hidden = torch.relu(F.linear(squeezed, fc1_weight, fc1_bias))
    return squeezed, hidden, torch.sigmoid(F.linear(hidden, fc2_weight, fc2_bias))


def _matrices(norm: Norm, dtype: torch.dtype) -> SEWeights:
    assert norm.se is not None
    fc1_weight, fc1_bias, fc2_weight, fc2_bias = (part.to(dtype) for part in norm.se)
    return SEWeights(fc1_weight.flatten(1), fc1_bias, fc2_weight.flatten(1), fc2_bias)


def backward(sums: tuple[Tensor], saved: Saved, norm: Norm) -> tuple[Tensor, SEWeights]:
    """Return `Sums.squeeze_grad` (N, C), and the gradients of the SE's weights and biases."""
    (partial,) = sums
    gate = saved.gate if saved.excited is None else saved.excited
    assert saved.stats is not None
    assert gate is not None
    assert saved.squeezed is not None
    assert saved.hidden is not None
    assert norm.se is not None
    se, pixels = _matrices(norm, partial.dtype), saved.y[0, 0].numel()
    if norm.blur:
        pixels = math.prod(tiles.blurred(saved.y.shape))
    grad = partial[:, 0] * norm.beta.to(partial.dtype) + partial[:, 1] * saved.stats[1]
    if saved.drop_path_scale is not None:  # a sample that was dropped gives the SE no gradient
        grad = grad * saved.drop_path_scale
    grad = grad * gate * (1 - gate)
    inner = (grad @ se.fc2_weight) * (saved.hidden > 0)
    grads = inner.T @ saved.squeezed, inner.sum(0), grad.T @ saved.hidden, grad.sum(0)
    return inner @ se.fc1_weight / pixels, SEWeights(
        *(grad.view_as(part).to(part.dtype) for grad, part in zip(grads, norm.se, strict=True))
    )
