"""The operations between two convolutions, forward and backward, by kernels or plain PyTorch.

They are relu(gate * blur(act(gamma * (y - mean) / sqrt(var + eps) + beta)) + shortcut), each part
if requested, in a few passes over the convolution's output y. Forward reads y twice (statistics,
apply), or three times with an SE after an activation. Backward reads y twice: one pass takes the
sums that BN, SE and the ReLU of the join need, one writes the gradient. Kept for backward are y,
vectors, and the sign of each value of a join, in one bit.

`tresnet.fused` runs these functions between its convolutions. Each uses the launches of `launch`,
or with `kernels=False` the functions of the same names in `reference`.
"""

from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tresnet.errors import InputError
from tresnet.ops import tiles
from tresnet.ops.abn import launch, reference
from tresnet.ops.excite import launch as excite_launch
from tresnet.ops.excite import reference as excite_reference


class SEWeights(NamedTuple):
    """Layers from C channels to R and back: weights (R, C) and (C, R), or with (1, 1) after."""

    fc1_weight: Tensor
    fc1_bias: Tensor
    fc2_weight: Tensor
    fc2_bias: Tensor


class Norm(NamedTuple):
    """Tensors and settings of a batch norm and of the operations after it.

    Attributes:
        gamma: (C,); None if the norm is folded into the convolution, whose bias is then `beta`.
        beta: (C,).
        mean: Running mean (C,), updated in place while training.
        var: Unbiased running variance (C,), updated likewise.
        momentum: Weight of the batch in the running statistics; None for no update.
        slope: Negative slope of the leaky ReLU; None for no activation.
        blur: Blur and keep every second pixel, as `blur_pool`.
        se: Layers of the squeeze and excitation that follows.
        group: Process group that synchronises the statistics. One of its processes may have a
            single value per channel, or an empty batch.
        channels: Number of channels to synchronise; further ones are padding. None for all.
    """

    gamma: Tensor | None
    beta: Tensor
    mean: Tensor | None = None
    var: Tensor | None = None
    training: bool = False
    momentum: float | None = None
    eps: float = 1e-5
    slope: float | None = None
    blur: bool = False
    se: SEWeights | None = None
    group: Any = None
    channels: int | None = None


class Kept(NamedTuple):
    """Tensors of forward that backward reads.

    Attributes:
        y: (N, C, H, W), the convolution's output.
        stats: (4, C): mean, gamma * invstd, invstd, biased variance; None if the norm is folded.
        total: Values per channel over all processes; None for this process only.
        gate: (N, C), factors of the map.
        excited: (N, C), the gate of the SE, if `passed` changed it.
        passed: (N, 1), factors of the samples.
        squeezed: (N, C), input of the SE's layers.
        hidden: (N, R), their hidden layer.
        bits: Mask of the join's ReLU: bits by kernels, booleans by plain PyTorch.
    """

    y: Tensor
    stats: Tensor | None
    total: Tensor | None = None
    gate: Tensor | None = None
    excited: Tensor | None = None
    passed: Tensor | None = None
    squeezed: Tensor | None = None
    hidden: Tensor | None = None
    bits: Tensor | None = None


class Sums(NamedTuple):
    """Results of the first pass of backward.

    Attributes:
        merged: (4, C): gradients of gamma and beta, and the factors of the second pass.
        squeeze_grad: (N, C), gradient of the squeeze over its pixels; None without a gate.
        written: The masked gradient of a join, else the layer's output, if requested.
        se: Gradients of the SE's layers.
    """

    merged: Tensor
    squeeze_grad: Tensor | None
    written: Tensor | None
    se: SEWeights | None


def forward(
    y: Tensor,
    norm: Norm,
    *,
    kernels: bool,
    shortcut: Tensor | None = None,
    passed: Tensor | None = None,
    keeps: bool = False,
) -> tuple[Tensor, Kept]:
    """Return the output, and the tensors that backward reads, if it `keeps` them.

    `y` (N, C, H, W) is the dense output of a convolution. `shortcut` has the output's shape and the
    memory format of `y`, and is added before a ReLU. `passed` (N, 1) holds factors of the samples:
    0 where stochastic depth drops one. Raises `InputError` if statistics that are not synchronised
    have one value per channel.
    """
    if y.numel() == 0:
        return _absent(y, norm)
    ops = launch if kernels else reference
    linear = norm.training and norm.se is not None and norm.slope is None and not norm.blur
    stats, sums, total = _statistics(y, norm, ops, linear)
    gate = excited = squeezed = hidden = None
    if norm.se is not None:
        if sums is None:  # else the squeeze is linear, and follows from the samples' means
            sums = ops.squeeze(y, stats, norm.beta, norm.slope, norm.blur)
        squeezed, hidden, gate = _excite(kernels).forward(
            sums, y, stats, norm.beta, linear, norm.blur, *norm.se
        )
    if passed is not None:
        excited, gate = gate, passed.expand(y.shape[:2]) if gate is None else gate * passed
        gate = gate.contiguous()
    bits_kept = keeps and shortcut is not None
    out, bits = ops.apply(y, stats, norm.beta, gate, shortcut, norm.slope, norm.blur, bits_kept)
    bits = bits if bits_kept else None
    return out, Kept(y, stats, total, gate, excited, passed, squeezed, hidden, bits)


def rebuild(norm: Norm, kept: Kept, *, kernels: bool, shortcut: Tensor | None = None) -> Tensor:
    """Recompute and return the output of `forward`."""
    if kept.y.numel() == 0:
        return _empty_output(kept.y, norm)
    ops = launch if kernels else reference
    return ops.apply(
        kept.y, kept.stats, norm.beta, kept.gate, shortcut, norm.slope, norm.blur, False
    )[0]


def gradient_sums(
    grad: Tensor, second: Tensor | None, norm: Norm, kept: Kept, *, kernels: bool, rebuilds: bool
) -> Sums:
    """Run the first pass of backward: the sums of arXiv 1502.03167, section 3, and those of the SE.

    `grad` is the gradient of the output, in the memory format of `kept.y`; `second`, from another
    reader of the output, is added to it. The running statistics of `norm` are not read. `rebuilds`
    writes the output again, for a layer without blur and join.
    """
    assert norm.gamma is not None
    if kept.y.numel() == 0:
        return _absent_sums(grad, norm, kept)
    assert kept.stats is not None
    ops = launch if kernels else reference
    stats, gate, joined = kept.stats, kept.gate, kept.bits is not None
    partial, written = ops.grad_sums(
        grad, second, kept.y, kept.bits, gate, stats, norm.beta, norm.slope, norm.blur, rebuilds
    )
    squeeze_grad = se = None
    if norm.se is not None:
        assert gate is not None
        through = partial
        if kept.passed is not None:  # dropped samples have no gradient
            samples = partial.view(len(gate), -1, *partial.shape[1:])
            through = (samples * kept.passed[:, None, None]).view(partial.shape)
        squeeze_grad, *found = _excite(kernels).backward(
            through, stats, norm.beta, gate if kept.excited is None else kept.excited,
            kept.squeezed, kept.hidden, *norm.se, grad[0, 0].numel(),
        )  # fmt: skip
        se = SEWeights(*found)
    elif gate is not None:
        squeeze_grad = torch.zeros_like(gate)
    merged = ops.merge_grad_sums(
        partial, gate, squeeze_grad, stats, kept.y.numel() // kept.y.shape[1]
    )
    if kept.total is not None:
        merged = _synchronised_factors(merged, stats, kept.total, norm)
    return Sums(merged, squeeze_grad, written if joined or rebuilds else None, se)


def gradient(grad: Tensor, norm: Norm, kept: Kept, sums: Sums, *, kernels: bool) -> Tensor:
    """Run the second pass of backward: return the gradient of `kept.y`.

    `grad` is the gradient of the output, or for a join the map that `gradient_sums` wrote.
    """
    if kept.y.numel() == 0:
        return torch.zeros_like(kept.y)
    assert kept.stats is not None
    ops = launch if kernels else reference
    return ops.grad_apply(
        grad, kept.y, kept.stats, norm.beta, kept.gate, sums.squeeze_grad, sums.merged, norm.slope,
        norm.blur, norm.training,
    )  # fmt: skip


def _excite(kernels: bool) -> ModuleType:
    return excite_launch if kernels else excite_reference


def _statistics(
    y: Tensor, norm: Norm, ops: ModuleType, per_sample: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return statistics (4, C), moments `per_sample`, and the count per channel if synchronised."""
    if norm.gamma is None:
        return None, None, None
    if not norm.training:
        stats = ops.running_statistics(norm.gamma, norm.mean, norm.var, norm.eps)
        return stats, None, None
    count = y.numel() // y.shape[1]
    alone = norm.group is None
    if alone and count == 1:
        raise InputError(
            f"batch statistics need more than one value per channel, got {tuple(y.shape)}: "
            "use a larger batch or image, or call model.eval()"
        )
    update = alone and norm.momentum is not None
    # The operator counts a change of both tensors, which would end a backward that has kept them.
    mean, var = (norm.mean, norm.var) if update else (y.new_empty(0), y.new_empty(0))
    stats, partial = ops.statistics(
        y, norm.gamma, mean, var, norm.momentum or 0.0, norm.eps, per_sample, update
    )
    total = None
    if not alone:
        stats, total = _synchronised(stats, count, norm)
    return stats, partial if per_sample else None, total


def _synchronised(stats: Tensor, count: int, norm: Norm) -> tuple[Tensor, Tensor]:
    """Return the statistics over all processes, (4, C), and the values per channel on the device.

    The running statistics are updated too. `stats` (4, C) are those of this process, weighted by
    its `count` of values per channel: even if that is 0, they must be finite.
    """
    assert norm.gamma is not None
    mean, _, _, var = stats[:, : norm.channels]
    own = torch.cat((mean, var, stats.new_full((1,), count)))
    gathered = own.new_empty(dist.get_world_size(norm.group), own.numel())
    dist.all_gather_into_tensor(gathered.view(-1), own, group=norm.group)
    means, variances = gathered[:, :-1].unflatten(1, (2, -1)).unbind(1)
    counts = gathered[:, -1:]
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    var = ((variances + (means - mean) ** 2) * counts).sum(0) / total
    invstd = torch.rsqrt(var + norm.eps)
    if norm.momentum is not None:
        for old, new in ((norm.mean, mean), (norm.var, var * (total / (total - 1)))):
            assert old is not None
            old[: norm.channels].lerp_(new.to(old.dtype), norm.momentum)
    gamma = norm.gamma[: norm.channels].to(var.dtype)
    return _widened(torch.stack((mean, gamma * invstd, invstd, var)), norm), total


def _widened(values: Tensor, norm: Norm) -> Tensor:
    """Return `values` (K, channels) with zeros for padded channels."""
    if norm.channels is None:
        return values
    return F.pad(values, (0, len(norm.beta) - norm.channels))


def _synchronised_factors(merged: Tensor, stats: Tensor, total: Tensor, norm: Norm) -> Tensor:
    """Return `merged` with factors k1 and k0 from the sums over all processes.

    The gradients of weight and bias stay this process's, as data-parallel training averages them.
    """
    sums = merged[:2, : norm.channels].clone()
    dist.all_reduce(sums, group=norm.group)
    sums, scale, invstd = _widened(sums, norm), stats[1], stats[2]
    factors = -sums / total * torch.stack((scale * invstd, scale))
    return torch.cat((merged[:2], factors))


def _empty_output(y: Tensor, norm: Norm) -> Tensor:
    return y.new_empty((*y.shape[:2], *tiles.blurred(y.shape)) if norm.blur else y.shape)


def _absent(y: Tensor, norm: Norm) -> tuple[Tensor, Kept]:
    """Run `forward` for an empty batch; other processes wait for its part of the collective."""
    stats = total = None
    if norm.training and norm.group is not None:
        dtype = torch.float64 if y.dtype == torch.float64 else torch.float32
        stats, total = _synchronised(norm.beta.new_zeros(4, y.shape[1], dtype=dtype), 0, norm)
    return _empty_output(y, norm), Kept(y, stats, total)


def _absent_sums(grad: Tensor, norm: Norm, kept: Kept) -> Sums:
    """Run `gradient_sums` for an empty batch, which adds zeros to the other processes' sums."""
    dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
    merged = norm.beta.new_zeros(4, len(norm.beta), dtype=dtype)
    if kept.total is not None:
        dist.all_reduce(merged[:2, : norm.channels].clone(), group=norm.group)
    se = None if norm.se is None else SEWeights(*map(torch.zeros_like, norm.se))
    return Sums(merged, None, grad, se)


__all__ = [
    "Kept", "Norm", "SEWeights", "Sums", "forward", "gradient", "gradient_sums", "rebuild",
]  # fmt: skip
