"""BN, activation, blur, SE and join by the kernels: one saved buffer and the fewest passes.

Forward reads the convolution's output twice (statistics, apply), three times with an SE after an
activation. Backward reads it twice: one pass sums what BN, SE and the ReLU of the join need, one
writes the gradient. Saved are the convolution's output, per-channel and per-sample vectors, and
where there is a join, of each value of the block's output whether it is positive, in one bit. Where
that output is not kept for the next convolution either, the shortcut takes the bits' place.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tresnet.errors import InputError
from tresnet.ops import recompute, tiles, twice
from tresnet.ops.abn import launch, reference
from tresnet.ops.autocast import autocast_off
from tresnet.ops.excite import launch as excite


class Settings(NamedTuple):
    """What is not a tensor.

    Attributes:
        training: use the statistics of the batch.
        momentum: weight of the batch in the running statistics.
        eps: added to the variance.
        slope: negative slope of the leaky ReLU; None leaves the activation out.
        blur: blur and keep every second pixel, as `blur_pool`; x is then (N, C, H, W).
        group: process group over which the statistics are synchronised, of which a process may have
            a single value per channel, or an empty batch; None for this process alone. By the
            kernels only.
        keep_output: False offers the output of a join for recomputation too, so that only `x` and
            the shortcut are kept; by the kernels only.
    """

    training: bool
    momentum: float = 0.1
    eps: float = 1e-5
    slope: float | None = 1e-2
    blur: bool = False
    group: Any = None
    keep_output: bool = True


def _synchronised(
    stats: Tensor,
    count: int,
    weight: Tensor,
    running: tuple[Tensor, Tensor],
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    """The statistics over all processes, (4, C), and the number of values per channel, on device.

    The running statistics are updated by them.

    Args:
        stats: of this process, (4, C); finite where it has no values.
        count: its values per channel.
        weight: (C,).
        running: mean and variance, (C,).
        settings: of the operation.
    """
    own = torch.cat((stats[0], stats[3], stats.new_full((1,), count)))
    world = dist.get_world_size(settings.group)
    gathered = own.new_empty(world, own.numel())
    dist.all_gather_into_tensor(gathered.view(-1), own, group=settings.group)
    means, variances = gathered[:, :-1].unflatten(1, (2, -1)).unbind(1)
    counts = gathered[:, -1:]
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    var = ((variances + (means - mean) ** 2) * counts).sum(0) / total
    invstd = torch.rsqrt(var + settings.eps)
    for old, new in zip(running, (mean, var * (total / (total - 1))), strict=True):
        old.lerp_(new.to(old.dtype), settings.momentum)
    return torch.stack((mean, weight.float() * invstd, invstd, var)), total


def _statistics(
    x: Tensor, weight: Tensor, running: tuple[Tensor, Tensor], per_sample: bool, settings: Settings
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Statistics to normalise by (4, C), the samples' own, and the count where it is not ours."""
    mean, var = running
    if not settings.training:
        return launch.running_statistics(weight, mean, var, settings.eps), None, None
    alone = settings.group is None
    stats, partial = launch.statistics(
        x, weight, mean, var, settings.momentum, settings.eps, per_sample, alone
    )
    if alone:
        return stats, partial, None
    with autocast_off(x.device.type):
        count = x.numel() // x.shape[1]
        stats, total = _synchronised(stats, count, weight, running, settings)
    return stats, partial, total


class FusedABN(torch.autograd.Function):
    """BN + leaky ReLU, then blur, SE scale and residual join where asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        settings: Settings,
        keep_bits: bool,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        shortcut: Tensor | None,
        *layers: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Return the output, its twin, and the statistics (4, C) and gate (N, C) that produce it.

        The twin of a join is the same memory with a gradient of its own: where the output has two
        readers, their gradients come here unsummed. The compiler sees none; it fuses the sum.
        """
        slope, blur = settings.slope, settings.blur
        fc1_weight, fc1_bias, fc2_weight, fc2_bias = layers
        x = tiles.dense(x)  # it is: so the compiler knows the strides of what is saved
        linear_squeeze = settings.training and slope is None and not blur and fc1_weight is not None
        stats, partial, total = _statistics(
            x, weight, (running_mean, running_var), linear_squeeze, settings
        )
        gate = squeezed = hidden = None
        if fc1_weight is not None:
            if partial is None or not linear_squeeze:  # a linear function's means need no pass
                partial = launch.squeeze(x, stats, bias, slope, blur)
            squeezed, hidden, gate = excite.forward(
                partial, x, stats, bias, linear_squeeze, blur, *layers
            )
        out, bits = launch.apply(x, stats, bias, gate, shortcut, slope, blur, keep_bits)
        joined = shortcut is not None
        ctx.save_for_backward(
            x, weight, bias, stats, total, fc1_weight, fc2_weight, squeezed, hidden, gate,
            bits if keep_bits else None, None if keep_bits else shortcut,
            fc1_bias, fc2_bias,
        )  # fmt: skip
        ctx.joined = joined
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(stats, *(() if gate is None else (gate,)))
        twin = out.detach() if joined and not torch.compiler.is_compiling() else None
        return out, twin, stats, gate

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor | None, twin_grad: Tensor | None, *_: Any
    ) -> tuple[Any, ...]:
        """Return the gradients; arXiv 1502.03167, section 3, with SE's in the same sums."""
        if grad is None:
            grad, twin_grad = twin_grad, None
        if grad is None:
            return (None,) * 12
        if twice.wanted():
            return _plain_backward(ctx, grad if twin_grad is None else grad + twin_grad)
        with autocast_off(grad.device.type):
            return _backward(ctx, grad, twin_grad)


def _backward(ctx: Any, grad: Tensor, twin_grad: Tensor | None) -> tuple[Any, ...]:
    settings: Settings = ctx.settings
    (
        x, weight, bias, stats, total, fc1, fc2, squeezed, hidden, gate, bits, shortcut,
        fc1_bias, fc2_bias,
    ) = ctx.saved_tensors  # fmt: skip
    grad = tiles.dense(grad.to(x.dtype), x)
    if twin_grad is not None:
        twin_grad = tiles.dense(twin_grad.to(x.dtype), x)
    partial, masked = launch.grad_sums(
        grad, twin_grad, x, bits, shortcut, gate, stats, bias, settings.slope, settings.blur
    )
    spread, fc_grads = None, [None] * 4
    if gate is not None:
        spread, *fc_grads = excite.backward(
            partial, stats, bias, gate, squeezed, hidden, fc1, fc1_bias, fc2, fc2_bias,
            grad[0, 0].numel(),
        )  # fmt: skip
    count = x.numel() // x.shape[1]
    merged = launch.merge_grad_sums(partial, gate, spread, stats, count)
    if total is not None:
        merged = _synchronised_factors(merged, stats, total, settings.group)
    grad_x = None
    source = masked if ctx.joined else grad
    del grad, twin_grad  # where they are copies, their memory is free for what follows
    if ctx.needs_input_grad[2]:
        grad_x = launch.grad_apply(
            source, x, stats, bias, gate, spread, merged, settings.slope, settings.blur,
            settings.training,
        )  # fmt: skip
    grads = grad_x, merged[0].to(weight.dtype), merged[1].to(bias.dtype)
    return None, None, *grads, None, None, masked if ctx.joined else None, *fc_grads


def _plain_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Gradients that can be differentiated again, by plain operators in float32."""
    x, weight, bias, stats, total, fc1, fc2, _, _, _, bits, shortcut, fc1_bias, fc2_bias = (
        ctx.saved_tensors
    )
    settings: Settings = ctx.settings
    if total is not None:
        raise InputError(
            "second derivatives need the statistics of one process, got synchronised ones: "
            "pass create_graph=False, or group=None"
        )

    def plain(*inputs: Any) -> Tensor:
        x, weight, bias, *layers = (_float(part) for part in inputs)
        running = stats[0].clone(), stats[3].clone()
        y = reference.abn(
            x, weight, bias, *running, settings.training, 0.0, settings.eps, settings.slope
        )
        return reference.tail(y, settings.blur, layers if fc1 is not None else None, None)

    inputs = (x, weight, bias, fc1, fc1_bias, fc2, fc2_bias)
    needs = ctx.needs_input_grad[2:5] + ctx.needs_input_grad[8:]
    grad, masked = grad.float(), None
    if ctx.joined:
        with torch.no_grad():
            if bits is None:
                blocked = plain(*inputs) + shortcut.float() <= 0
            else:
                blocked = ~launch.unpacked(bits, x)
        grad = grad.masked_fill(blocked, 0.0)
        masked = grad.to(x.dtype)
    first = twice.gradients(plain, inputs, needs, grad)
    return None, None, *first[:3], None, None, masked, *first[3:]


def _float(x: Any) -> Any:
    return None if x is None else x.float()


def _synchronised_factors(merged: Tensor, stats: Tensor, total: Tensor, group: Any) -> Tensor:
    """`merged` with the factors of the gradient of x from the sums over all processes.

    The gradients of weight and bias stay this process's: data-parallel training averages them.
    """
    sums = merged[:2].clone()
    dist.all_reduce(sums, group=group)
    scale, invstd = stats[1], stats[2]
    factors = -sums / total * torch.stack((scale * invstd, scale))
    return torch.cat((merged[:2], factors))


class AbsentABN(torch.autograd.Function):
    """`FusedABN` of a process without values, which the others' statistics and sums wait for."""

    @staticmethod
    def forward(
        ctx: Any,
        settings: Settings,
        running: tuple[Tensor, Tensor],
        x: Tensor,
        weight: Tensor,
        *others: Tensor | None,
    ) -> Tensor:
        """Return no values, in the shape of the output."""
        nothing = weight.new_zeros(4, x.shape[1], dtype=torch.float32)
        with autocast_off(x.device.type):
            _synchronised(nothing, 0, weight, running, settings)
        ctx.save_for_backward(x, weight, *others)
        ctx.group = settings.group
        ctx.set_materialize_grads(False)
        return x.new_empty((*x.shape[:2], *tiles.blurred(x.shape)) if settings.blur else x.shape)

    @staticmethod
    @once_differentiable  # pyright: ignore[reportArgumentType]
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor | None
    ) -> tuple[Any, ...]:
        """Add nothing to the sums, and return zeros."""
        inputs = ctx.saved_tensors
        if grad is None:
            return (None,) * (2 + len(inputs))
        sums = inputs[1].new_zeros(2, len(inputs[1]), dtype=torch.float32)
        dist.all_reduce(sums, group=ctx.group)
        return None, None, *(None if part is None else torch.zeros_like(part) for part in inputs)


def fused_abn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running: tuple[Tensor, Tensor],
    shortcut: Tensor | None,
    se: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    """Run the kernels, and offer an output that can be rebuilt for recomputation.

    Returns:
        The output, twice. Those of a join are two handles of one memory: two readers that take one
        each spare backward the sum of their gradients. A gradient asked for by the first handle
        leaves out what went through the second, so only one of them may get where a user is.
    """
    layers = se or (None,) * 4
    if x.numel() == 0:
        absent: Any = AbsentABN.apply(settings, running, x, weight, bias, shortcut, *layers)
        return absent, absent
    x = tiles.dense(x)
    if shortcut is not None:
        shortcut = tiles.dense(shortcut, x)
    kept = shortcut is not None and settings.keep_output
    y, twin, stats, gate = FusedABN.apply(  # pyright: ignore[reportGeneralTypeIssues]
        settings, kept and torch.is_grad_enabled(), x, weight, bias, *running, shortcut, *layers
    )
    twin = y if twin is None else twin
    if kept:
        return y, twin
    gated = gate is not None
    factors = [part for part in (gate, shortcut) if part is not None]

    def rebuild(x: Tensor, stats: Tensor, bias: Tensor, *factors: Tensor) -> Tensor:
        x, left = tiles.dense(x), list(factors)
        scale = left.pop(0) if gated else None
        added = tiles.dense(left[0], x) if left else None
        return launch.apply(x, stats, bias, scale, added, settings.slope, settings.blur)[0]

    recompute.offer(y, rebuild, x, stats, bias, *factors)
    return y, twin
