"""Batch normalisation followed by a leaky ReLU, in plain PyTorch."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tresnet.ops.blur_pool.reference import blur_pool


def abn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    slope: float | None,
) -> Tensor:
    """Normalise each channel, scale by `weight`, shift by `bias`, apply the activation.

    y = act(weight * (x - mean) / sqrt(var + eps) + bias), with the statistics of the batch while
    training (the running ones are then updated, the variance unbiased) and the running statistics
    otherwise.

    Args:
        x: (N, C, ...), floating point.
        weight: (C,), gamma, of any sign.
        bias: (C,), beta.
        running_mean: (C,), updated in place while training; None for none to update.
        running_var: likewise.
        training: use the statistics of the batch.
        momentum: weight of the batch in the running statistics.
        eps: added to the variance.
        slope: negative slope of the leaky ReLU; None leaves the activation out.

    Returns:
        (N, C, ...) in the dtype of `x`.
    """
    y = F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    return y if slope is None else _leaky_relu(y, slope)


def affine(x: Tensor, scale: Tensor, shift: Tensor, slope: float | None) -> Tensor:
    """Return act(scale * x + shift) per channel: the second half of `abn`, statistics given.

    Args:
        x: (N, C, ...), floating point.
        scale: (C,), float32 (float64 for a float64 `x`).
        shift: (C,), as `scale`.
        slope: negative slope of the leaky ReLU; None leaves the activation out.

    Returns:
        (N, C, ...) in the dtype of `x`.
    """
    # Normalising by mean 0, variance 1 and eps 0 is one pass that computes in the dtype of `scale`
    # and rounds once, like the forward pass.
    zeros, ones = torch.zeros_like(scale), torch.ones_like(scale)
    # (torch.nn.functional.batch_norm refuses eps 0 up to torch 2.11.)
    y = torch.batch_norm(x, scale, shift, zeros, ones, False, 0.0, 0.0, False)
    return y if slope is None else _leaky_relu(y, slope)


def _leaky_relu(y: Tensor, slope: float) -> Tensor:
    # in place, PyTorch cannot tell a negative slope's inputs from its outputs
    return F.leaky_relu(y, slope, inplace=slope >= 0)


def tail(
    y: Tensor,
    blur: bool,
    se: Sequence[Tensor] | None,
    shortcut: Tensor | None,
) -> Tensor:
    """Blur, squeeze and excite, and join, each where asked for (paper sections 2.1, 2.4, 2.5).

    Args:
        y: (N, C, H, W), floating point.
        blur: blur and keep every second pixel.
        se: weight (R, C) and bias of the layer that reduces, weight (C, R) and bias of the one that
            expands.
        shortcut: added before a ReLU.

    Returns:
        (N, C, H, W) or (N, C, ceil(H / 2), ceil(W / 2)).
    """
    if blur:
        y = blur_pool(y)
    if se is not None:
        hidden = torch.relu(F.linear(y.mean((2, 3)), se[0], se[1]))
        y = y * torch.sigmoid(F.linear(hidden, se[2], se[3]))[:, :, None, None]
    if shortcut is not None:
        y = torch.relu(y + shortcut)
    return y
