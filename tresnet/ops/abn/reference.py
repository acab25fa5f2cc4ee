"""Batch normalisation, leaky ReLU and the operations after them in a block, in plain PyTorch.

`abn` and `tail` define forward, and autograd differentiates them. Each other public function
defines the function of `launch` with the same name and arguments. Every definition but `abn` and
`tail` computes in float32, or in float64 for float64 inputs.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tresnet.ops.abn.types import Kept, Norm, Sums
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


def statistics(y: Tensor, norm: Norm, *, per_sample: bool) -> tuple[Tensor, Tensor | None]:
    """Return mean, scale, invstd and variance (4, C); if `per_sample`, also sample means (N, C)."""
    values = _wide(y)
    weight, *running = norm.vectors()
    var, mean = torch.var_mean(values.transpose(0, 1).flatten(1), 1, correction=0)
    if norm.momentum is not None and norm.group is None:
        count = y.numel() // y.shape[1]
        for old, new in zip(running, (mean, var * (count / (count - 1))), strict=True):
            old.lerp_(new.to(old.dtype), norm.momentum)
    means = _over_pixels(values, torch.mean) if per_sample else None
    return _normaliser(mean, var, weight, norm.eps), means


def running_statistics(norm: Norm) -> Tensor:
    """Return mean, scale, invstd and variance (4, C), from the running statistics."""
    weight, mean, var = norm.vectors()
    return _normaliser(_wide(mean), _wide(var), weight, norm.eps)


def squeeze(kept: Kept, norm: Norm) -> Tensor:
    """Return the mean of each sample's activated, blurred map: (N, C)."""
    return _over_pixels(_activated(kept, norm), torch.mean)


def apply(
    kept: Kept, norm: Norm, shortcut: Tensor | None, *, keeps_bits: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the output, and the mask of its ReLU if `keeps_bits`."""
    out = _activated(kept, norm)
    out = out if kept.gate is None else out * _per_sample(kept.gate, out)
    out = out if shortcut is None else torch.relu(out + shortcut)
    out = out.to(kept.y.dtype)
    return out, ~(out <= 0) if keeps_bits else None


def grad_sums(
    grad: Tensor, second: Tensor | None, kept: Kept, norm: Norm, *, rebuilds: bool
) -> tuple[Tensor, Tensor | None]:
    """Return sums over pixels, (N, 2, C) or, with a gate, (N, 4, C), and a map or None.

    The map is the masked gradient if `kept.bits` is given, or the output if `rebuilds`.
    """
    y, written = kept.y, None
    g = _wide(grad) if second is None else _wide(grad) + second
    if kept.bits is not None:
        g = g.masked_fill(~kept.bits, 0.0)
        written = g.to(y.dtype)
    elif rebuilds:
        written, _ = apply(kept, norm, None, keeps_bits=False)
    m, delta = _slope(kept, norm), _centred(kept)
    g = m * _back(g, kept, norm)
    sums = [g, g * delta]
    if kept.gate is not None:
        w = m * _back(torch.ones_like(grad, dtype=g.dtype), kept, norm)
        sums += [w, w * delta]
    return torch.stack([_over_pixels(part, torch.sum) for part in sums], 1), written


def merge_grad_sums(partial: Tensor, squeeze_grad: Tensor | None, kept: Kept) -> Tensor:
    """Return `Sums.merged` (4, C), from the sums of all samples."""
    sums, stats = partial[:, :2], kept.stats
    assert stats is not None
    if kept.gate is not None and squeeze_grad is not None:
        sums = sums * kept.gate[:, None] + partial[:, 2:] * squeeze_grad[:, None]
    grad_bias, centred = sums.sum(0)
    _, scale, invstd, _ = stats
    grad_weight, count = centred * invstd, kept.y.numel() // kept.y.shape[1]
    return torch.stack(
        (grad_weight, grad_bias, -scale * invstd * grad_weight / count, -scale * grad_bias / count)
    )


def grad_apply(grad: Tensor, kept: Kept, norm: Norm, sums: Sums) -> Tensor:
    """Return the gradient of `kept.y`; in training, also through the mean and variance."""
    g, stats = _wide(grad), kept.stats
    assert stats is not None
    if kept.gate is not None and sums.squeeze_grad is not None:
        g = g * _per_sample(kept.gate, g) + _per_sample(sums.squeeze_grad, g)
    g = _back(g, kept, norm) * _slope(kept, norm) * _channels(stats[1], kept.y)
    if norm.training:
        g = g + _centred(kept) * _channels(sums.merged[2], g) + _channels(sums.merged[3], g)
    return g.to(kept.y.dtype)


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


def _centred(kept: Kept) -> Tensor:
    z = _wide(kept.y)
    return z if kept.stats is None else z - _channels(kept.stats[0], z)


def _normalised(kept: Kept, norm: Norm) -> Tensor:
    z = _centred(kept)
    z = z if kept.stats is None else z * _channels(kept.stats[1], z)
    return z + _channels(norm.beta.to(z.dtype), z)


def _activated(kept: Kept, norm: Norm) -> Tensor:
    z = _normalised(kept, norm)
    z = z if norm.slope is None else F.leaky_relu(z, norm.slope)
    return blur_pool(z) if norm.blur else z


def _slope(kept: Kept, norm: Norm) -> Tensor | float:
    if norm.slope is None:
        return 1.0
    z = _normalised(kept, norm)
    return torch.where(z > 0, torch.ones_like(z), norm.slope)


def _back(grad: Tensor, kept: Kept, norm: Norm) -> Tensor:
    return transposed_blur_pool(grad, *kept.y.shape[2:]) if norm.blur else grad
