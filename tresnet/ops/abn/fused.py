"""BN, activation, blur, SE and join by the kernels: one saved buffer and the fewest passes.

Forward reads the convolution's output twice (statistics, apply), three times with an SE after an
activation. Backward reads it twice: one pass sums what BN, SE and the ReLU of the join need, one
writes the gradient. Saved are the convolution's output, per-channel and per-sample vectors, and
where there is a join, of each value of the block's output whether it is positive, in one bit. Where
that output is not kept for the next convolution either, the shortcut takes the bits' place.

A convolution that alone reads the output can run in the same node of the graph. Its input is then
not kept and needs no pass of its own to be rebuilt: backward computes the convolution's input
gradient first, the pass that sums writes the input as it goes, and the weight's gradient reads it.
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


class Convolution(NamedTuple):
    """A convolution without bias behind the rest, as `torch.conv2d` takes it."""

    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """Convolve `x`."""
        return torch.conv2d(x, weight, None, *self)

    def gradient(self, grad: Tensor, x: Tensor, weight: Tensor, of_weight: bool) -> Tensor:
        """The gradient of `weight`, or of `x`: the one reads no values of the other."""
        grads = torch.ops.aten.convolution_backward(
            grad, x, weight, None, self.stride, self.padding, self.dilation, False, (0, 0),
            self.groups, (not of_weight, of_weight, False),
        )  # fmt: skip
        return grads[of_weight]


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


class _Saved(NamedTuple):
    """What is kept for backward."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    stats: Tensor
    total: Any = None
    gate: Any = None
    squeezed: Any = None
    hidden: Any = None
    bits: Any = None
    shortcut: Any = None
    convolution_weight: Any = None
    fc1_weight: Any = None
    fc1_bias: Any = None
    fc2_weight: Any = None
    fc2_bias: Any = None


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


def excited(
    x: Tensor, stats: Any, bias: Tensor, partial: Any, slope: Any, blur: bool, layers: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """What SE squeezes, its hidden layer and its gate; `partial` spares a pass over `x`."""
    linear = partial is not None
    if partial is None:
        partial = launch.squeeze(x, stats, bias, slope, blur)
    return excite.forward(partial, x, stats, bias, linear, blur, *layers)


class FusedABN(torch.autograd.Function):
    """BN + leaky ReLU, then blur, SE scale, residual join or convolution where asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        settings: Settings,
        keep_bits: bool,
        convolution: Convolution | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        shortcut: Tensor | None,
        convolution_weight: Tensor | None,
        *layers: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Return the output, its twin, and the statistics (4, C) and gate (N, C) that produce it.

        The twin of a join is the same memory with a gradient of its own: where the output has two
        readers, their gradients come here unsummed. The compiler sees none; it fuses the sum.
        """
        slope, blur = settings.slope, settings.blur
        x = tiles.dense(x)  # it is: so the compiler knows the strides of what is saved
        linear_squeeze = settings.training and slope is None and not blur and layers[0] is not None
        stats, partial, total = _statistics(
            x, weight, (running_mean, running_var), linear_squeeze, settings
        )
        squeezed = hidden = gate = None
        if layers[0] is not None:
            sums = partial if linear_squeeze else None  # a linear function's means need no pass
            squeezed, hidden, gate = excited(x, stats, bias, sums, slope, blur, layers)
        out, bits = launch.apply(x, stats, bias, gate, shortcut, slope, blur, keep_bits)
        ctx.joined = joined = shortcut is not None
        ctx.settings, ctx.convolution = settings, convolution
        if convolution is not None and convolution_weight is not None:
            out = convolution.output(out, convolution_weight)
        shortcut, bits = (None, bits) if keep_bits else (shortcut, None)
        ctx.save_for_backward(
            *_Saved(
                x, weight, bias, stats, total, gate, squeezed, hidden, bits, shortcut,
                convolution_weight, *layers,
            )
        )  # fmt: skip
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
            return (None,) * 14
        if twice.wanted():
            return _plain_backward(ctx, grad if twin_grad is None else grad + twin_grad)
        with autocast_off(grad.device.type):
            return _backward(ctx, grad, twin_grad)


def _backward(ctx: Any, grad: Tensor, twin_grad: Tensor | None) -> tuple[Any, ...]:
    settings: Settings = ctx.settings
    slope, blur = settings.slope, settings.blur
    convolution: Convolution | None = ctx.convolution
    saved = _Saved(*ctx.saved_tensors)
    x, stats, bias, gate = saved.x, saved.stats, saved.bias, saved.gate
    convolved = grad.to(x.dtype)
    if convolution is not None:
        grad = convolution.gradient(convolved, x, saved.convolution_weight, of_weight=False)
    grad = tiles.dense(grad.to(x.dtype), x)
    if twin_grad is not None:
        twin_grad = tiles.dense(twin_grad.to(x.dtype), x)
    again = convolution is not None and ctx.needs_input_grad[9]
    partial, written = launch.grad_sums(
        grad, twin_grad, x, saved.bits, saved.shortcut, gate, stats, bias, slope, blur, again
    )
    convolution_grad = None
    if convolution is not None and again:
        conv_weight = saved.convolution_weight
        convolution_grad = convolution.gradient(convolved, written, conv_weight, of_weight=True)
    spread, fc_grads = None, [None] * 4
    if gate is not None:
        spread, *fc_grads = excite.backward(
            partial, stats, bias, gate, saved.squeezed, saved.hidden, saved.fc1_weight,
            saved.fc1_bias, saved.fc2_weight, saved.fc2_bias, grad[0, 0].numel(),
        )  # fmt: skip
    merged = launch.merge_grad_sums(partial, gate, spread, stats, x.numel() // x.shape[1])
    if saved.total is not None:
        merged = _synchronised_factors(merged, stats, saved.total, settings.group)
    grad_x, masked = None, written if ctx.joined else None
    source = grad if masked is None else masked
    del grad, twin_grad, convolved, written  # what nobody else holds is free for what follows
    if ctx.needs_input_grad[3]:
        grad_x = launch.grad_apply(
            source, x, stats, bias, gate, spread, merged, slope, blur, settings.training
        )
    grads = grad_x, merged[0].to(saved.weight.dtype), merged[1].to(bias.dtype)
    return None, None, None, *grads, None, None, masked, convolution_grad, *fc_grads


def _plain_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Gradients that can be differentiated again, by plain operators in float32."""
    settings: Settings = ctx.settings
    saved = _Saved(*ctx.saved_tensors)
    stats = saved.stats
    if saved.total is not None:
        raise InputError(
            "second derivatives need the statistics of one process, got synchronised ones: "
            "pass create_graph=False, or group=None"
        )

    def plain(*inputs: Any) -> Tensor:
        x, weight, bias, convolution_weight, *layers = (_float(part) for part in inputs)
        running = stats[0].clone(), stats[3].clone()
        y = reference.abn(
            x, weight, bias, *running, settings.training, 0.0, settings.eps, settings.slope
        )
        y = reference.tail(y, settings.blur, layers if layers[0] is not None else None, None)
        return y if ctx.convolution is None else ctx.convolution.output(y, convolution_weight)

    inputs = saved.x, saved.weight, saved.bias, *saved[-5:]
    needs = ctx.needs_input_grad[3:6] + ctx.needs_input_grad[9:]
    grad, masked = grad.float(), None
    if ctx.joined:
        with torch.no_grad():
            if saved.bits is None:
                blocked = plain(*inputs) + saved.shortcut.float() <= 0
            else:
                blocked = ~launch.unpacked(saved.bits, saved.x)
        grad = grad.masked_fill(blocked, 0.0)
        masked = grad.to(saved.x.dtype)
    first = twice.gradients(plain, inputs, needs, grad)
    return None, None, None, *first[:3], None, None, masked, *first[3:]


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
    convolution: Convolution | None = None,
    convolution_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the kernels, and offer an output that can be rebuilt for recomputation.

    Args:
        x: (N, C, ...).
        weight: (C,), gamma.
        bias: (C,), beta.
        running: mean and variance, (C,), updated in place while training.
        shortcut: added before a ReLU.
        se: the two layers of squeeze and excitation.
        settings: what is not a tensor.
        convolution: what alone reads the output, and is run on it; without blur and shortcut.
        convolution_weight: its weight, in the dtype of `x`.

    Returns:
        The output, twice. Those of a join are two handles of one memory: two readers that take one
        each spare backward the sum of their gradients. A gradient asked for by the first handle
        leaves out what went through the second, so only one of them may get where a user is.
    """
    layers = se or (None,) * 4
    if x.numel() == 0:
        absent: Any = AbsentABN.apply(settings, running, x, weight, bias, shortcut, *layers)
        if convolution is not None and convolution_weight is not None:
            absent = convolution.output(absent, convolution_weight)
        return absent, absent
    x = tiles.dense(x)
    if shortcut is not None:
        shortcut = tiles.dense(shortcut, x)
    kept = shortcut is not None and settings.keep_output
    y, twin, stats, gate = FusedABN.apply(  # pyright: ignore[reportGeneralTypeIssues]
        settings, kept and torch.is_grad_enabled(), convolution, x, weight, bias, *running,
        shortcut, convolution_weight, *layers,
    )  # fmt: skip
    twin = y if twin is None else twin
    if kept or convolution is not None:
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
