"""The operations between two convolutions, forward and backward, by kernels or plain PyTorch.

For a convolution's output y, forward returns
relu(gate * blur(act(gamma * (y - mean) / sqrt(var + eps) + beta)) + shortcut). The activation, the
blur, the gate, and the shortcut with its ReLU are optional. In training, forward reads y twice: for
the statistics and for the output. An SE (squeeze and excitation, which computes gate) after an
activation or a blur needs a third pass. Backward reads y twice. The first pass computes sums for BN
and SE, and masks the gradient by the ReLU. The second pass writes the gradient of y. Backward needs
y, the ReLU's mask, which has one bit for each value, and small tensors, such as the statistics.

`tresnet.fused` calls the public functions between its convolutions. With `kernels`, they call
functions of `launch`. Otherwise they call the functions of `reference` that have the same names.
"""

from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tresnet.errors import InputError
from tresnet.ops import tiles
from tresnet.ops.abn import launch, reference
from tresnet.ops.abn.types import Kept, Norm, SEWeights, Sums
from tresnet.ops.blur_pool import check_shape
from tresnet.ops.excite import launch as excite_launch
from tresnet.ops.excite import reference as excite_reference


def forward(
    y: Tensor,
    norm: Norm,
    *,
    kernels: bool,
    shortcut: Tensor | None = None,
    passed: Tensor | None = None,
    keeps: bool = False,
) -> tuple[Tensor, Kept]:
    """Return the output, and the tensors that backward reads.

    `y` (N, C, H, W) is the dense output of a convolution. `shortcut`, added before a ReLU, has the
    shape of the output, and the dtype and memory format of `y`. `passed` (N, 1) holds a factor for
    each sample: 0 if stochastic depth drops the sample. `keeps` adds the mask of the ReLU to the
    tensors for backward. Raises `InputError` if `norm.blur` is true and H or W is 1. In training,
    also raises `InputError` if a channel has only one value, unless `norm.group` is given.
    """
    if y.numel() == 0:
        return _absent(y, norm)
    if norm.blur:
        check_shape(y)
    ops = launch if kernels else reference
    linear = norm.training and norm.se is not None and norm.slope is None and not norm.blur
    stats, partial, total = _statistics(y, norm, ops, linear)
    gate = excited = squeezed = hidden = None
    if norm.se is not None:
        kept = Kept(y, stats)
        if partial is None:  # the statistics do not give the SE's means, so `y` is read again
            partial = ops.squeeze(kept, norm)
        squeezed, hidden, gate = _excite(kernels).forward(partial, kept, norm, linear=linear)
    if passed is not None:
        excited, gate = gate, passed.expand(y.shape[:2]) if gate is None else gate * passed
        gate = gate.contiguous()
    kept = Kept(y, stats, total, gate, excited, passed, squeezed, hidden)
    out, bits = ops.apply(kept, norm, shortcut, keeps_bits=keeps and shortcut is not None)
    return out, kept if bits is None else kept._replace(bits=bits)


def rebuild(norm: Norm, kept: Kept, *, kernels: bool, shortcut: Tensor | None = None) -> Tensor:
    """Recompute and return the output of `forward`."""
    if kept.y.numel() == 0:
        return _empty_output(kept.y, norm)
    ops = launch if kernels else reference
    return ops.apply(kept, norm, shortcut, keeps_bits=False)[0]


def gradient_sums(
    grad: Tensor, second: Tensor | None, norm: Norm, kept: Kept, *, kernels: bool, rebuilds: bool
) -> Sums:
    """Run the first pass of backward: compute sums for BN (arXiv 1502.03167, section 3) and SE.

    `grad` is the gradient of the output, with the dtype and memory format of `kept.y`. `second`,
    the gradient from a second consumer of the output, is added to `grad`. `rebuilds` also
    recomputes the output; it is allowed only without blur and shortcut.
    """
    if kept.y.numel() == 0:
        return _absent_sums(grad, norm, kept)
    ops = launch if kernels else reference
    partial, written = ops.grad_sums(grad, second, kept, norm, rebuilds=rebuilds)
    squeeze_grad = se = None
    if norm.se is not None:
        through = partial
        if kept.passed is not None:  # samples that stochastic depth dropped have no gradient
            samples = partial.view(len(kept.passed), -1, *partial.shape[1:])
            through = (samples * kept.passed[:, None, None]).view(partial.shape)
        squeeze_grad, se = _excite(kernels).backward(through, kept, norm)
    elif kept.gate is not None:
        squeeze_grad = torch.zeros_like(kept.gate)
    merged = ops.merge_grad_sums(partial, squeeze_grad, kept)
    if kept.total is not None:
        merged = _synchronised_factors(merged, kept, norm)
    return Sums(merged, squeeze_grad, written, se)


def gradient(grad: Tensor, norm: Norm, kept: Kept, sums: Sums, *, kernels: bool) -> Tensor:
    """Run the second pass of backward: return the gradient of `kept.y`.

    `grad` is the gradient of the output, or `sums.written` if forward added a shortcut.
    """
    if kept.y.numel() == 0:
        return torch.zeros_like(kept.y)
    return (launch if kernels else reference).grad_apply(grad, kept, norm, sums)


def _excite(kernels: bool) -> ModuleType:
    return excite_launch if kernels else excite_reference


def _statistics(
    y: Tensor, norm: Norm, ops: ModuleType, per_sample: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return `Kept.stats`, the second result of `ops.statistics` and `Kept.total`, each or None."""
    if norm.gamma is None:
        return None, None, None
    if not norm.training:
        return ops.running_statistics(norm), None, None
    count = y.numel() // y.shape[1]
    if norm.group is None and count == 1:
        raise InputError(
            f"batch statistics need more than one value per channel, got {tuple(y.shape)}: "
            "use a larger batch or image, or call model.eval()"
        )
    stats, partial = ops.statistics(y, norm, per_sample=per_sample)
    if norm.group is None:
        return stats, partial, None
    stats, total = _synchronised(stats, count, norm)
    return stats, partial, total


def _synchronised(stats: Tensor, count: int, norm: Norm) -> tuple[Tensor, Tensor]:
    """Return the statistics (4, C) and the number of values per channel, over all processes.

    Running statistics are updated in place. `stats` (4, C) are the statistics of this process,
    which has `count` values per channel. `stats` must be finite even if `count` is 0.
    """
    mean, _, _, var = stats[:, : norm.channels]
    own = torch.cat((mean, var, stats.new_full((1,), count)))
    gathered = own.new_empty(dist.get_world_size(norm.group), own.numel())
    dist.all_gather_into_tensor(gathered.view(-1), own, group=norm.group)
    means, variances = gathered[:, :-1].unflatten(1, (2, -1)).unbind(1)
    counts = gathered[:, -1:]
    total = counts.sum()
    mean = (means * counts).sum(0) / total.clamp(min=1)
    var = ((variances + (means - mean) ** 2) * counts).sum(0) / total.clamp(min=1)
    invstd = torch.rsqrt(var + norm.eps)
    weight, *running = norm.vectors()
    if norm.momentum is not None:
        momentum = norm.momentum * total.clamp(max=1)  # 0 if no process has a sample
        unbiased = var * (total / (total - 1).clamp(min=1))
        for old, new in zip(running, (mean, unbiased), strict=True):
            old[: norm.channels].lerp_(new.to(old.dtype), momentum.to(old.dtype))
    gamma = weight[: norm.channels].to(var.dtype)
    return _widened(torch.stack((mean, gamma * invstd, invstd, var)), norm), total


def _widened(values: Tensor, norm: Norm) -> Tensor:
    """Return `values` (K, norm.channels) with zeros appended for padded channels."""
    if norm.channels is None:
        return values
    return F.pad(values, (0, len(norm.beta) - norm.channels))


def _synchronised_factors(merged: Tensor, kept: Kept, norm: Norm) -> Tensor:
    """Return `merged` (`Sums.merged`) with k1 and k0 recomputed from sums over all processes.

    The gradients of gamma and beta stay those of this process, because DDP averages gradients.
    """
    sums = merged[:2, : norm.channels].clone()
    dist.all_reduce(sums, group=norm.group)
    assert kept.stats is not None
    assert kept.total is not None
    _, scale, invstd, _ = kept.stats
    factors = -_widened(sums, norm) / kept.total * torch.stack((scale * invstd, scale))
    return torch.cat((merged[:2], factors))


def _empty_output(y: Tensor, norm: Norm) -> Tensor:
    return y.new_empty((*y.shape[:2], *tiles.blurred(y.shape)) if norm.blur else y.shape)


def _absent(y: Tensor, norm: Norm) -> tuple[Tensor, Kept]:
    """Run `forward` for an empty batch, and take part in the other processes' collectives."""
    stats = total = None
    if norm.training and norm.group is not None:
        dtype = torch.float64 if y.dtype == torch.float64 else torch.float32
        stats, total = _synchronised(norm.beta.new_zeros(4, y.shape[1], dtype=dtype), 0, norm)
    return _empty_output(y, norm), Kept(y, stats, total)


def _absent_sums(grad: Tensor, norm: Norm, kept: Kept) -> Sums:
    """Run `gradient_sums` for an empty batch, and add zeros to the all-reduced sums."""
    dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
    merged = norm.beta.new_zeros(4, len(norm.beta), dtype=dtype)
    if kept.total is not None:
        dist.all_reduce(merged[:2, : norm.channels].clone(), group=norm.group)
    se = None if norm.se is None else SEWeights(*map(torch.zeros_like, norm.se))
    return Sums(merged, None, grad, se)


__all__ = [
    "Kept", "Norm", "SEWeights", "Sums", "forward", "gradient", "gradient_sums", "rebuild",
]  # fmt: skip
