"""Launches of the kernels: tensors in, tensors out.

They return a tensor for everything; one that was not asked for has no elements.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from tresnet.ops.operators import operator
from tresnet.ops.tiles import Geometry, Plan, blurred, geometry, halved, memory_format, plan

RUNNING_CHANNELS, RUNNING_WARPS = 256, 4
MERGE_TILE, MERGE_WARPS = 4096, 8
SAMPLE_CHUNKS, SAMPLE_CHANNELS, SAMPLE_WARPS = 16, 64, 4


@functools.cache
def _kernels() -> Any:
    from tresnet.ops.abn import kernels

    return kernels


def _merging(groups: int, channels: int, tile: int) -> tuple[int, dict[str, int]]:
    """Programs and options of a kernel that merges groups.

    It waits for memory, not for bandwidth: as many groups at once as there are, from few channels.
    Of two widths, so that not every batch size has kernels of its own.
    """
    bg = tile // (4 if groups > tile // 16 else 16)
    bc = min(tile // bg, 16)
    return -(-channels // bc), {"BG": bg, "BC": bc, "num_warps": MERGE_WARPS}


def grad_cut(
    x: Tensor, gate: Tensor | None, blur: bool, writes: bool
) -> tuple[Geometry, Geometry, Plan]:
    """A dense `x`, what backward's passes over it cut, with blur squares of its pixels, and how."""
    source = geometry(x, whole_batch=not blur and gate is None)
    shape = halved(x) if blur else source
    return source, shape, plan(shape, blur, writes, source)


def _image(x: Tensor, blur: bool) -> tuple[int, int, int, int]:
    """H, W, H_out, W_out of the blur; ones where there is none."""
    return (x.shape[-2], x.shape[-1], *blurred(x.shape)) if blur else (1, 1, 1, 1)


def _nothing(x: Tensor) -> Tensor:
    return x.new_empty(0, dtype=torch.float32)


def _stats(x: Tensor, channels: int) -> Tensor:
    return x.new_empty(4, channels, dtype=torch.float32)


def _samples(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[:2], dtype=torch.float32)


@operator(
    lambda x, w, mean, var, momentum, eps, per_sample, update: (
        _stats(x, x.shape[1]),
        _samples(x) if per_sample else _nothing(x),
    ),
    updates=("running_mean", "running_var"),
)
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
    shape = geometry(x, whole_batch=not per_sample)
    cut = plan(shape)
    groups = shape.n * cut.splits
    partial = x.new_empty(groups, 2, shape.c, dtype=torch.float32)
    stats = _stats(x, shape.c)
    _kernels().moments[(cut.programs,)](
        x, partial, shape.p, shape.c, *shape.strides, cut.splits, cut.chunk,
        **cut.options,
    )  # fmt: skip
    mean, var = running_mean.contiguous(), running_var.contiguous()
    programs, options = _merging(groups, shape.c, MERGE_TILE)
    _kernels().merge_moments[(programs,)](
        partial, weight.contiguous(), mean, var, stats, groups, shape.c, shape.p,
        cut.splits, cut.chunk, momentum, eps, UPDATE=update,
        **options,
    )  # fmt: skip
    for part, updated in ((running_mean, mean), (running_var, var)):
        if update and part is not updated:  # has strides: the kernel updated a copy
            part.copy_(updated)
    return stats, _merged_samples(partial, shape, cut) if per_sample else _nothing(x)


def _merged_samples(partial: Tensor, shape: Geometry, cut: Plan) -> Tensor:
    """Means of the samples, (N, C), from their chunks' means and deviations, or sums."""
    means = partial.new_empty(shape.n, shape.c)
    _kernels().merge_samples[(shape.n * -(-shape.c // SAMPLE_CHANNELS),)](
        partial, means, shape.c, shape.p, cut.splits, cut.chunk, KINDS=partial.dim() - 1,
        BS=SAMPLE_CHUNKS, BC=SAMPLE_CHANNELS, num_warps=SAMPLE_WARPS,
    )  # fmt: skip
    return means


@operator(lambda weight, *_: _stats(weight, weight.shape[0]))
def running_statistics(weight: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """What normalises by the running statistics: (4, C) as `statistics` returns it."""
    channels = weight.shape[0]
    stats = _stats(weight, channels)
    _kernels().running_moments[(-(-channels // RUNNING_CHANNELS),)](
        weight.contiguous(), mean.contiguous(), var.contiguous(), stats, channels, eps,
        BC=RUNNING_CHANNELS, num_warps=RUNNING_WARPS,
    )  # fmt: skip
    return stats


@operator(_samples)
def squeeze(x: Tensor, stats: Tensor, bias: Tensor, slope: float | None, blur: bool) -> Tensor:
    """Mean over the pixels of each sample after activation and blur: (N, C), float32."""
    source = geometry(x, whole_batch=False)
    shape = halved(x) if blur else source
    cut = plan(shape, blur, source=source)
    partial = x.new_empty(shape.n * cut.splits, shape.c, dtype=torch.float32)
    _kernels().squeeze[(cut.programs,)](
        x, stats, stats[1], bias.contiguous(), partial, shape.p, shape.c, *_image(x, blur),
        *source.strides, cut.splits, cut.chunk, slope or 0.0, HAS_ACT=slope is not None, BLUR=blur,
        **cut.options,
    )  # fmt: skip
    return _merged_samples(partial, shape, cut)


def _output(x: Tensor, blur: bool) -> Tensor:
    size = (*x.shape[:2], *blurred(x.shape)) if blur else x.shape
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=memory_format(x))


@operator(lambda x, stats, bias, gate, shortcut, slope, blur: _output(x, blur))
def apply(
    x: Tensor,
    stats: Tensor,
    bias: Tensor,
    gate: Tensor | None,
    shortcut: Tensor | None,
    slope: float | None,
    blur: bool,
) -> Tensor:
    """relu(gate * blur(act((x - mean) * scale + bias)) + shortcut), each part where asked for."""
    out = _output(x, blur)
    source = geometry(x, whole_batch=not blur and gate is None)
    shape = halved(x, times=2) if blur else source
    cut = plan(shape, blur, writes=True, source=source)
    norm = x, stats, stats[1], bias.contiguous(), _or(gate, x)
    switches = {"HAS_ACT": slope is not None, "HAS_GATE": gate is not None}
    if blur:
        _kernels().apply_blurred[(cut.programs,)](
            *norm, out, shape.p, shape.c, *_image(x, blur), *source.strides,
            *geometry(out, whole_batch=False).strides, cut.splits, cut.chunk, slope or 0.0,
            **switches, **cut.options,
        )  # fmt: skip
    else:
        _kernels().apply[(cut.programs,)](
            *norm, _or(shortcut, x), out, shape.p, shape.c, *source.strides,
            cut.splits, cut.chunk, slope or 0.0, JOIN=shortcut is not None,
            **switches, **cut.options,
        )  # fmt: skip
    return out


def _grad_sums_outputs(
    grad: Tensor, twin_grad: Any, x: Tensor, out: Any, shortcut: Any, gate: Any, stats: Any,
    bias: Any, slope: Any, blur: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _, shape, cut = grad_cut(x, gate, blur, writes=False)
    groups, kinds = shape.n * cut.splits, 2 if gate is None else 4
    partial = x.new_empty(groups, kinds, shape.c, dtype=torch.float32)
    joins = out is not None or shortcut is not None
    return partial, torch.empty_like(x) if joins else _nothing(x)


@operator(_grad_sums_outputs)
def grad_sums(
    grad: Tensor,
    twin_grad: Tensor | None,
    x: Tensor,
    out: Tensor | None,
    shortcut: Tensor | None,
    gate: Tensor | None,
    stats: Tensor,
    bias: Tensor,
    slope: float | None,
    blur: bool,
) -> tuple[Tensor, Tensor]:
    """The sums of backward's first pass, (groups, 2 or 4, C), and of a join the masked gradient.

    A join gives `out`, or `shortcut` where its output was not kept. The gradient is that of two
    readers where there is a `twin_grad`: `grad + twin_grad`, added in float32, never written.
    """
    source, shape, cut = grad_cut(x, gate, blur, writes=False)
    partial, masked = _grad_sums_outputs(
        grad, twin_grad, x, out, shortcut, gate, stats, bias, slope, blur
    )
    joined = shortcut if out is None else out
    _kernels().grad_sums[(cut.programs,)](
        grad, _or(twin_grad, grad), x, _or(joined, x), _or(gate, stats), stats, stats[1],
        bias.contiguous(), masked, partial, shape.p, shape.c, *_image(x, blur), *source.strides,
        *geometry(grad, whole_batch=False).strides, cut.splits, cut.chunk, slope or 0.0,
        HAS_ACT=slope is not None, BLUR=blur, HAS_GATE=gate is not None,
        JOIN=0 if joined is None else 2 if out is None else 1, TWIN=twin_grad is not None,
        **cut.options,
    )  # fmt: skip
    return partial, masked


@operator(lambda partial, gate, spread, stats, count: torch.empty_like(stats))
def merge_grad_sums(
    partial: Tensor,
    gate: Tensor | None,
    spread: Tensor | None,
    stats: Tensor,
    count: int,
) -> Tensor:
    """Gradients of weight and bias, k1 and k0, as (4, C): see the kernel."""
    groups, _, channels = partial.shape
    out = torch.empty_like(stats)
    splits = 1 if gate is None else groups // gate.shape[0]
    # the gate has six values a group and channel, otherwise there are two
    programs, options = _merging(groups, channels, MERGE_TILE // (4 if gate is not None else 1))
    _kernels().merge_grad_sums[(programs,)](
        partial, _or(gate, stats), _or(spread, stats), stats, out, groups, channels, splits,
        float(count), HAS_GATE=gate is not None,
        **options,
    )  # fmt: skip
    return out


@operator(lambda grad, x, *_: torch.empty_like(x))
def grad_apply(
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
    """Second pass of backward: the gradient of `x`; merged is what `merge_grad_sums` returned."""
    grad_x = torch.empty_like(x)
    source, shape, cut = grad_cut(x, gate, blur, writes=True)
    _kernels().grad_apply[(cut.programs,)](
        grad, x, stats, stats[1], bias.contiguous(), _or(gate, x), _or(spread, x), merged[2:],
        grad_x, shape.p, shape.c, *_image(x, blur), *source.strides,
        *geometry(grad, whole_batch=False).strides, cut.splits, cut.chunk, slope or 0.0,
        HAS_ACT=slope is not None, BLUR=blur, HAS_GATE=gate is not None, TRAINING=training,
        **cut.options,
    )  # fmt: skip
    return grad_x


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """`x`, or a tensor to fill a kernel's argument that it does not read."""
    return other if x is None else x
