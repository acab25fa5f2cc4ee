"""Batch normalisation, leaky ReLU and the operations after them in a block, in plain PyTorch.

`abn` and `tail` define the operation; autograd differentiates them. The other functions are the
definitions of the launches of the same names and arguments in `launch`. They compute in float32, or
for float64 inputs in float64.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tresnet.ops.blur_pool.reference import blur_pool, transposed_blur_pool


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

    y = act(weight * (x - mean) / sqrt(var + eps) + bias) (arXiv 1502.03167, algorithm 1). In
    training the statistics are those of the batch, and the running ones, unless None, are updated
    in place, by the unbiased variance. Otherwise the running statistics are used. Shapes: `x`
    (N, C, ...), the other tensors (C,); the output has the dtype of `x`. `momentum` is the weight
    of the batch. `slope` is that of the leaky ReLU, or None for no activation.
    """
    y = F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    # with a negative slope, an in-place output does not determine the sign of its input
    return y if slope is None else F.leaky_relu(y, slope, inplace=slope >= 0)


def tail(y: Tensor, blur: bool, se: Sequence[Tensor] | None, shortcut: Tensor | None) -> Tensor:
    """Blur, squeeze and excite, and join, each if requested (paper sections 2.1, 2.4, 2.5).

    `y` is (N, C, H, W), floating point; a blur halves H and W, rounded up. `se` are the weights and
    biases of `SEWeights`. The shortcut is added before a ReLU.
    """
    if blur:
        y = blur_pool(y)
    if se is not None:
        hidden = torch.relu(F.linear(y.mean((2, 3)), se[0].flatten(1), se[1]))
        y = y * torch.sigmoid(F.linear(hidden, se[2].flatten(1), se[3]))[:, :, None, None]
    if shortcut is not None:
        y = torch.relu(y + shortcut)
    return y


def statistics(
    x: Tensor,
    weight: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    per_sample: bool,
    update: bool,
) -> tuple[Tensor, Tensor]:
    """Return the batch's statistics (4, C), and the mean of each sample (N, C) if `per_sample`."""
    values = _wide(x)
    var, mean = torch.var_mean(values.transpose(0, 1).flatten(1), 1, correction=0)
    if update:
        count = x.numel() // x.shape[1]
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
    means = _over_pixels(values, torch.mean) if per_sample else mean
    return _normaliser(mean, var, weight, eps), means


def running_statistics(weight: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """Return mean, scale, invstd and variance (4, C) of the running statistics."""
    wide = torch.float64 if var.dtype == torch.float64 else torch.float32
    return _normaliser(mean.to(wide), var.to(wide), weight, eps)


def squeeze(
    x: Tensor, stats: Tensor | None, bias: Tensor, slope: float | None, blur: bool
) -> Tensor:
    """Return the mean of each sample's activated, blurred map: (N, C)."""
    return _over_pixels(_activated(x, stats, bias, slope, blur), torch.mean)


def apply(
    x: Tensor,
    stats: Tensor | None,
    bias: Tensor,
    gate: Tensor | None,
    shortcut: Tensor | None,
    slope: float | None,
    blur: bool,
    keep_bits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the output, and the mask of the join's ReLU."""
    y = _activated(x, stats, bias, slope, blur)
    y = y if gate is None else y * _per_sample(gate, y)
    y = y if shortcut is None else torch.relu(y + shortcut)
    y = y.to(x.dtype)
    return y, ~(y <= 0) if keep_bits else y


def grad_sums(
    grad: Tensor,
    second_grad: Tensor | None,
    x: Tensor,
    bits: Tensor | None,
    gate: Tensor | None,
    stats: Tensor,
    bias: Tensor,
    slope: float | None,
    blur: bool,
    again: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the sums over each sample, (N, 2 or 4, C), and the map that `launch` writes."""
    g, written = _wide(grad), x
    g = g if second_grad is None else g + second_grad
    if bits is not None:
        g = g.masked_fill(~bits, 0.0)
        written = g.to(x.dtype)
    elif again:
        written = apply(x, stats, bias, gate, None, slope, blur)[0]
    m, delta = _slope(x, stats, bias, slope), _wide(x) - _channels(stats[0], x)
    g = m * _back(g, x, blur)
    sums = [g, g * delta]
    if gate is not None:
        w = m * _back(torch.ones_like(grad, dtype=g.dtype), x, blur)
        sums += [w, w * delta]
    return torch.stack([_over_pixels(part, torch.sum) for part in sums], 1), written


def merge_grad_sums(
    partial: Tensor, gate: Tensor | None, squeeze_grad: Tensor | None, stats: Tensor, count: int
) -> Tensor:
    """Return the gradients of weight and bias, and the factors k1 and k0 of `grad_apply`."""
    sums = partial[:, :2]
    if gate is not None and squeeze_grad is not None:
        sums = sums * gate[:, None] + partial[:, 2:] * squeeze_grad[:, None]
    grad_bias, centred = sums.sum(0)
    _, scale, invstd, _ = stats
    grad_weight = centred * invstd
    return torch.stack(
        (grad_weight, grad_bias, -scale * invstd * grad_weight / count, -scale * grad_bias / count)
    )


def grad_apply(
    grad: Tensor,
    x: Tensor,
    stats: Tensor,
    bias: Tensor,
    gate: Tensor | None,
    squeeze_grad: Tensor | None,
    merged: Tensor,
    slope: float | None,
    blur: bool,
    training: bool,
) -> Tensor:
    """Return the gradient of `x`; the factors k1 and k0 only apply in training."""
    g = _wide(grad)
    if gate is not None and squeeze_grad is not None:
        g = g * _per_sample(gate, g) + _per_sample(squeeze_grad, g)
    g = _back(g, x, blur) * _slope(x, stats, bias, slope) * _channels(stats[1], x)
    if training:
        g = g + (_wide(x) - _channels(stats[0], x)) * _channels(merged[2], x)
        g = g + _channels(merged[3], x)
    return g.to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _normaliser(mean: Tensor, var: Tensor, weight: Tensor, eps: float) -> Tensor:
    invstd = torch.rsqrt(var + eps)
    return torch.stack((mean, weight.to(var.dtype) * invstd, invstd, var))


def _over_pixels(x: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    return reduce(x.flatten(2), 2) if x.dim() > 2 else x


def _channels(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _per_sample(values: Tensor, like: Tensor) -> Tensor:
    return values.view(*values.shape, *[1] * (like.dim() - 2))


def _normalised(x: Tensor, stats: Tensor | None, bias: Tensor) -> Tensor:
    z = _wide(x)
    if stats is not None:
        z = (z - _channels(stats[0], x)) * _channels(stats[1], x)
    return z + _channels(bias.to(z.dtype), x)


def _activated(
    x: Tensor, stats: Tensor | None, bias: Tensor, slope: float | None, blur: bool
) -> Tensor:
    z = _normalised(x, stats, bias)
    z = z if slope is None else F.leaky_relu(z, slope)
    return blur_pool(z) if blur else z


def _slope(x: Tensor, stats: Tensor, bias: Tensor, slope: float | None) -> Tensor | float:
    if slope is None:
        return 1.0
    z = _normalised(x, stats, bias)
    return torch.where(z > 0, torch.ones_like(z), slope)


def _back(grad: Tensor, x: Tensor, blur: bool) -> Tensor:
    return transposed_blur_pool(grad, *x.shape[2:]) if blur else grad
