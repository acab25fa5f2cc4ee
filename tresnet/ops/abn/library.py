"""The kernels as operators of PyTorch: what fake tensors, torch.compile and the dispatcher see.

Operators return a tensor for everything; one that was not asked for has no elements.
"""

import torch
from torch import Tensor

from tresnet.ops import tiles
from tresnet.ops.abn import launch


def _nothing(x: Tensor) -> Tensor:
    return x.new_empty(0, dtype=torch.float32)


@torch.library.custom_op("tresnet::bn_statistics", mutates_args=("running_mean", "running_var"))
def bn_statistics(
    x: Tensor,
    weight: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    per_sample: bool,
    update: bool,
) -> tuple[Tensor, Tensor]:
    """Statistics of a batch, and an update of the running ones.

    Args:
        x: (N, C, ...), dense.
        weight: (C,), gamma.
        running_mean: (C,), updated in place if `update`.
        running_var: (C,), likewise, by the unbiased variance.
        momentum: weight of the batch in the running statistics.
        eps: added to the variance.
        per_sample: return the mean of each sample too.
        update: whether the running statistics are updated.

    Returns:
        (4, C) float32: mean, gamma * invstd, invstd, biased variance; and (N, C) or nothing.
    """
    running = (running_mean, running_var) if update else None
    with tiles.device_of(x):
        stats, means = launch.statistics(x, weight, running, momentum, eps, per_sample)
    return stats, _nothing(x) if means is None else means


@bn_statistics.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    per_sample: bool,
    update: bool,
) -> tuple[Tensor, Tensor]:
    stats = x.new_empty(4, x.shape[1], dtype=torch.float32)
    return stats, x.new_empty(x.shape[:2], dtype=torch.float32) if per_sample else _nothing(x)


@torch.library.custom_op("tresnet::bn_running_statistics", mutates_args=())
def bn_running_statistics(weight: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """(4, C) float32 from the running statistics: mean, gamma * invstd, invstd, variance."""
    with tiles.device_of(weight):
        return launch.running_statistics(weight, mean, var, eps)


@bn_running_statistics.register_fake
def _(weight: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    return weight.new_empty(4, weight.shape[0], dtype=torch.float32)


@torch.library.custom_op("tresnet::bn_squeeze", mutates_args=())
def bn_squeeze(x: Tensor, stats: Tensor, bias: Tensor, slope: float | None, blur: bool) -> Tensor:
    """Mean over the pixels of each sample after BN, activation and blur: (N, C) float32."""
    with tiles.device_of(x):
        return launch.squeeze(x, stats, bias, slope, blur)


@bn_squeeze.register_fake
def _(x: Tensor, stats: Tensor, bias: Tensor, slope: float | None, blur: bool) -> Tensor:
    return x.new_empty(x.shape[:2], dtype=torch.float32)


@torch.library.custom_op("tresnet::bn_apply", mutates_args=())
def bn_apply(
    x: Tensor,
    stats: Tensor,
    bias: Tensor,
    gate: Tensor | None,
    shortcut: Tensor | None,
    slope: float | None,
    blur: bool,
) -> Tensor:
    """relu(gate * blur(act((x - mean) * scale + bias)) + shortcut), each part where asked for."""
    with tiles.device_of(x):
        return launch.apply(x, stats, bias, gate, shortcut, slope, blur)


@bn_apply.register_fake
def _(
    x: Tensor,
    stats: Tensor,
    bias: Tensor,
    gate: Tensor | None,
    shortcut: Tensor | None,
    slope: float | None,
    blur: bool,
) -> Tensor:
    size = (*x.shape[:2], *tiles.blurred(x.shape)) if blur else x.shape
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=tiles.memory_format(x))


@torch.library.custom_op("tresnet::bn_grad_sums", mutates_args=())
def bn_grad_sums(
    grad: Tensor,
    x: Tensor,
    out: Tensor | None,
    shortcut: Tensor | None,
    gate: Tensor | None,
    stats: Tensor,
    bias: Tensor,
    slope: float | None,
    blur: bool,
) -> tuple[Tensor, Tensor]:
    """First pass of backward: (groups, 2 or 4, C) float32, and of a join the masked gradient."""
    with tiles.device_of(x):
        partial, masked = launch.grad_sums(grad, x, out, shortcut, gate, stats, bias, slope, blur)
    return partial, _nothing(x) if masked is None else masked


@bn_grad_sums.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    out: Tensor | None,
    shortcut: Tensor | None,
    gate: Tensor | None,
    stats: Tensor,
    bias: Tensor,
    slope: float | None,
    blur: bool,
) -> tuple[Tensor, Tensor]:
    _, shape, cut = launch.grad_cut(x, gate, blur, writes=False)
    groups = shape.n * cut.splits
    partial = x.new_empty(groups, 2 if gate is None else 4, shape.c, dtype=torch.float32)
    joins = out is not None or shortcut is not None
    return partial, torch.empty_like(x) if joins else _nothing(x)


@torch.library.custom_op("tresnet::bn_merge_grad_sums", mutates_args=())
def bn_merge_grad_sums(
    partial: Tensor,
    gate: Tensor | None,
    spread: Tensor | None,
    stats: Tensor,
    count: int,
) -> Tensor:
    """Gradients of weight and bias, then the factors of x - mean and of 1: (4, C) float32."""
    with tiles.device_of(stats):
        return launch.merge_grad_sums(partial, gate, spread, stats, count)


@bn_merge_grad_sums.register_fake
def _(
    partial: Tensor,
    gate: Tensor | None,
    spread: Tensor | None,
    stats: Tensor,
    count: int,
) -> Tensor:
    return torch.empty_like(stats)


@torch.library.custom_op("tresnet::bn_grad_apply", mutates_args=())
def bn_grad_apply(
    grad: Tensor,
    x: Tensor,
    stats: Tensor,
    bias: Tensor,
    gate: Tensor | None,
    spread: Tensor | None,
    merged: Tensor,
    slope: float | None,
    blur: bool,
    training: bool,
) -> Tensor:
    """Second pass of backward: the gradient of `x`, in its dtype and memory format."""
    with tiles.device_of(x):
        return launch.grad_apply(
            grad, x, stats, bias, gate, spread, merged[2:], slope, blur, training
        )


@bn_grad_apply.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    stats: Tensor,
    bias: Tensor,
    gate: Tensor | None,
    spread: Tensor | None,
    merged: Tensor,
    slope: float | None,
    blur: bool,
    training: bool,
) -> Tensor:
    return torch.empty_like(x)
