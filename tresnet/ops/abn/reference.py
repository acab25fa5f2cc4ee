"""Batch normalisation, leaky ReLU and the operations after them in a block, in plain PyTorch.

`abn` and `tail` define forward, and autograd differentiates them. Each other public function
defines the function of `launch` with the same name and arguments. Every definition but `abn` and
`tail` computes in float32, or in float64 for float64 inputs.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tresnet.ops.abn.types import Norm, Saved, Sums
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

    y = act(weight * (x - mean) / sqrt(var + eps) + bias) (arXiv 1502.03167, algorithm 1). With
    `training`, mean and var are those of the batch. Running statistics that are not None are then
    updated in place, with the unbiased variance. Without `training`, mean and var are the running
    statistics. `x` is (N, C, ...), other tensors are (C,). The output has the dtype of `x`.
    `momentum` is the batch's weight in the update. If `slope` is None, there is no activation.
    """
    y = F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    # with a negative slope, backward cannot read the input's sign from an in-place output
    return y if slope is None else F.leaky_relu(y, slope, inplace=slope >= 0)


def tail(y: Tensor, blur: bool, se: Sequence[Tensor] | None, shortcut: Tensor | None) -> Tensor:
    """Apply a blur, a squeeze and excitation, and a shortcut, each if given (paper, section 2).

    `y` is (N, C, H, W), floating point. A blur halves H and W, rounded up. `se` holds the tensors
    of `SEWeights`. If `shortcut` is given, it is added, and a ReLU is applied to the sum.
    """
    if blur:
        y = blur_pool(y)
    if se is not None:
        squeezed = y.mean((2, 3)).to(se[0].dtype)
        hidden = torch.relu(F.linear(squeezed, se[0].flatten(1), se[1]))
        gate = torch.sigmoid(F.linear(hidden, se[2].flatten(1), se[3]))
        y = y * gate.to(y.dtype)[:, :, None, None]
    if shortcut is not None:
        y = torch.relu(y + shortcut)
    return y


def statistics(y: Tensor, norm: Norm, *, per_sample: bool) -> tuple[Tensor, tuple[Tensor] | None]:
    """Return mean, scale, invstd and unbiased variance: (4, C).

    If `per_sample`, the second result holds sample means (N, C).
    """
    values = _wide(y)
    assert norm.gamma is not None
    of_channels = values.transpose(0, 1).flatten(1)
    var, mean = torch.var_mean(of_channels, 1, correction=0)
    invstd, count = torch.rsqrt(var + norm.eps), of_channels.shape[1]
    unbiased = var * (count / (count - 1))
    stats = torch.stack((mean, norm.gamma.to(var.dtype) * invstd, invstd, unbiased))
    return stats, (_over_pixels(values, torch.mean),) if per_sample else None


def squeeze(saved: Saved, norm: Norm) -> tuple[Tensor]:
    """Return the mean of each sample's activated, blurred map: (N, C)."""
    return (_over_pixels(_activated(saved, norm), torch.mean),)


def apply(
    saved: Saved, norm: Norm, shortcut: Tensor | None, *, needs_mask: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the output, and the mask of its ReLU if `needs_mask`."""
    out = _activated(saved, norm)
    out = out if saved.gate is None else out * _per_sample(saved.gate, out)
    out = out if shortcut is None else torch.relu(out + shortcut)
    out = out.to(saved.y.dtype)
    return out, ~(out <= 0) if needs_mask else None


def restored(saved: Saved) -> Saved:
    """Return `saved`, whose mask has no layout of its own."""
    return saved


def grad_sums(
    grad: Tensor, second: Tensor | None, saved: Saved, norm: Norm, *, rebuilds: bool
) -> tuple[tuple[Tensor], Tensor | None, Tensor | None]:
    """Return sums over pixels, (N, 2, C) or, with a gate, (N, 4, C), and two maps or None.

    The maps are the masked gradient if `saved.mask` is given, and the output if `rebuilds`.
    """
    y, masked_grad, rebuilt = saved.y, None, None
    g = _wide(grad) if second is None else _wide(grad) + second
    if saved.mask is not None:
        g = g.masked_fill(~saved.mask, 0.0)
        masked_grad = g.to(y.dtype)
    if rebuilds:
        rebuilt, _ = apply(saved, norm, None, needs_mask=False)
    m, delta = _slope(saved, norm), _centred(saved)
    g = m * _back(g, saved, norm)
    sums = [g, g * delta]
    if saved.gate is not None:
        w = m * _back(torch.ones_like(grad, dtype=g.dtype), saved, norm)
        sums += [w, w * delta]
    of_samples = torch.stack([_over_pixels(part, torch.sum) for part in sums], 1)
    return (of_samples,), masked_grad, rebuilt


def merge_grad_sums(sums: tuple[Tensor], squeeze_grad: Tensor | None, saved: Saved) -> Tensor:
    """Return `Sums.factors` (4, C), from the sums of all samples."""
    (partial,), stats = sums, saved.stats
    assert stats is not None
    merged = partial[:, :2]
    if saved.gate is not None:
        merged = merged * saved.gate[:, None]
    if squeeze_grad is not None:
        merged = merged + partial[:, 2:] * squeeze_grad[:, None]
    grad_bias, centred = merged.sum(0)
    _, scale, invstd, _ = stats
    grad_weight, count = centred * invstd, saved.y.numel() // saved.y.shape[1]
    return torch.stack(
        (grad_weight, grad_bias, -scale * invstd * grad_weight / count, -scale * grad_bias / count)
    )


def grad_apply(grad: Tensor, saved: Saved, norm: Norm, sums: Sums) -> Tensor:
    """Return the gradient of `saved.y`; in training, also through the mean and variance."""
    g, stats = _wide(grad), saved.stats
    assert stats is not None
    if saved.gate is not None:
        g = g * _per_sample(saved.gate, g)
    if sums.squeeze_grad is not None:
        g = g + _per_sample(sums.squeeze_grad, g)
    g = _back(g, saved, norm) * _slope(saved, norm) * _channels(stats[1], saved.y)
    if norm.of_batch:
        g = g + _centred(saved) * _channels(sums.factors[2], g) + _channels(sums.factors[3], g)
    return g.to(saved.y.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _over_pixels(x: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    return reduce(x.flatten(2), 2) if x.dim() > 2 else x


def _channels(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _per_sample(values: Tensor, like: Tensor) -> Tensor:
    return values.view(*values.shape, *[1] * (like.dim() - 2))


def _centred(saved: Saved) -> Tensor:
    z = _wide(saved.y)
    return z if saved.stats is None else z - _channels(saved.stats[0], z)


def _normalised(saved: Saved, norm: Norm) -> Tensor:
    z = _centred(saved)
    z = z if saved.stats is None else z * _channels(saved.stats[1], z)
    return z + _channels(norm.beta.to(z.dtype), z)


def _activated(saved: Saved, norm: Norm) -> Tensor:
    z = _normalised(saved, norm)
    z = z if norm.slope is None else F.leaky_relu(z, norm.slope)
    return blur_pool(z) if norm.blur else z


def _slope(saved: Saved, norm: Norm) -> Tensor | float:
    if norm.slope is None:
        return 1.0
    z = _normalised(saved, norm)
    return torch.where(z > 0, torch.ones_like(z), norm.slope)


def _back(grad: Tensor, saved: Saved, norm: Norm) -> Tensor:
    return transposed_blur_pool(grad, *saved.y.shape[2:]) if norm.blur else grad
