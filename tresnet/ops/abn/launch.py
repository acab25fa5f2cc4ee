"""Launches of the kernels of the activated batch norm: tensors in, tensors out.

Each function allocates its results and launches one kernel, or two. Shapes and strides become a
grid and a list of constants, cached by shape, strides and dtype (`by_form`). A result that was not
requested is a tensor without elements.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tresnet.ops.operators import launch, operator
from tresnet.ops.tiles import (
    WARPS,
    Geometry,
    Plan,
    blurred,
    by_form,
    geometry,
    halved,
    memory_format,
    plan,
)

# Programs that run at once on a multiprocessor, as the registers of an H100 allow
# (tests/ops/test_kernel_traffic.py compiles them); those of backward's sums by (gated, blur).
RESIDENT = 8
SUMS_RESIDENT = {(False, False): 6, (True, False): 4, (False, True): 4, (True, True): 3}
RUNNING_CHANNELS, RUNNING_WARPS = 256, 4
MERGE_TILE, MERGE_WARPS = 4096, 8


@functools.cache
def _kernels() -> Any:
    from tresnet.ops.abn import kernels

    return kernels


def _merging(groups: int, channels: int, tile: int) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """Return the grid, BG and BC of a kernel that merges groups.

    Latency limits it, not bandwidth, so a program covers few channels and many groups at once. BG
    has two values only, so that not every batch size compiles its own kernel.
    """
    bg = tile // (4 if groups > tile // 16 else 16)
    bc = min(tile // bg, 16)
    return (-(-channels // bc), 1, 1), (bg, bc)


class _Cut(NamedTuple):
    """Launch of a pass over maps: grid, the kernel's constants, and groups of sums."""

    grid: tuple[int, int, int]
    numbers: tuple[Any, ...]
    groups: int


def _launched(cut: Plan, groups: int, *numbers: Any) -> _Cut:
    return _Cut((cut.programs, 1, 1), (*numbers, *cut.tile), groups)


def grad_cut(
    x: Tensor, processors: int, gated: bool, blur: bool, sums: bool
) -> tuple[Geometry, Geometry, Plan]:
    """Return the views of a dense `x` and of the pixels or squares to divide, and their plan."""
    source = geometry(x, as_one_sample=not (blur or gated))
    shape = halved(x) if blur else source
    resident = SUMS_RESIDENT[gated, blur] if sums else RESIDENT
    cut = plan(shape, processors * resident, blur, not sums, source, maps=1 + sums)
    return source, shape, cut


def _image(x: Tensor, blur: bool) -> tuple[int, int, int, int]:
    """Return H, W, H_out, W_out of the blur; ones if there is none."""
    return (x.shape[-2], x.shape[-1], *blurred(x.shape)) if blur else (1, 1, 1, 1)


def _nothing(x: Tensor) -> Tensor:
    return x.new_empty(0, dtype=torch.float32)


@functools.cache
def _no_values(device: torch.device) -> Tensor:
    """Return the tensor without elements that stands for `_nothing`."""
    return torch.empty(0, device=device)


def _stats(x: Tensor, channels: int) -> Tensor:
    return x.new_empty(4, channels, dtype=torch.float32)


@operator(
    lambda x, w, mean, var, momentum, eps, per_sample, update: (
        _stats(x, x.shape[1]),
        x.new_empty(_moments_cut(x, True).groups, 2, x.shape[1], dtype=torch.float32)
        if per_sample
        else _nothing(x),
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
    """Return the statistics of a dense `x` (N, C, ...); `update` changes the running ones in place.

    They are (4, C) float32: mean, gamma * invstd, invstd, biased variance. If `per_sample`, mean
    and sum of squared deviations of each chunk of each sample, (chunks, 2, C), follow.
    """
    grid, numbers, groups = _moments_cut(x, per_sample)
    pixels, channels, *_, splits, chunk = numbers[:-4]
    partial = x.new_empty(groups, 2, channels, dtype=torch.float32)
    stats = _stats(x, channels)
    launch(_kernels().moments, grid, WARPS, (x, partial), numbers)
    mean, var = running_mean.contiguous(), running_var.contiguous()
    grid, tile = _merging(groups, channels, MERGE_TILE)
    launch(
        _kernels().merge_moments, grid, MERGE_WARPS,
        (partial, weight.contiguous(), mean, var, stats),
        (groups, channels, pixels, splits, chunk, float(momentum), float(eps), update, *tile),
    )  # fmt: skip
    for part, updated in ((running_mean, mean), (running_var, var)):
        if update and part is not updated:  # has strides: the kernel updated a copy
            part.copy_(updated)
    return stats, partial if per_sample else _no_values(x.device)


@by_form
def _moments_cut(x: Tensor, processors: int, per_sample: bool) -> _Cut:
    shape = geometry(x, as_one_sample=not per_sample)
    cut = plan(shape, processors * RESIDENT)
    numbers = shape.p, shape.c, *shape.strides, cut.splits, cut.chunk
    return _launched(cut, shape.n * cut.splits, *numbers)


@operator(lambda weight, *_: _stats(weight, weight.shape[0]))
def running_statistics(weight: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """Return mean, gamma * invstd, invstd and variance, (4, C), of the running statistics."""
    channels = weight.shape[0]
    stats = _stats(weight, channels)
    launch(
        _kernels().running_moments, (-(-channels // RUNNING_CHANNELS), 1, 1), RUNNING_WARPS,
        (weight.contiguous(), mean.contiguous(), var.contiguous(), stats),
        (channels, float(eps), RUNNING_CHANNELS),
    )  # fmt: skip
    return stats


def _squeeze_sums(x: Tensor, stats: Any, bias: Any, slope: float | None, blur: bool) -> Tensor:
    return x.new_empty(_squeeze_cut(x, slope, blur, True).groups, x.shape[1], dtype=torch.float32)


@operator(_squeeze_sums)
def squeeze(
    x: Tensor, stats: Tensor | None, bias: Tensor, slope: float | None, blur: bool
) -> Tensor:
    """Return sums over the pixels of each sample's chunks, after activation and blur: (chunks, C).

    Without `stats`, `x` is already normalised, but not shifted.
    """
    grid, numbers, _ = _squeeze_cut(x, slope, blur, stats is not None)
    partial, bias = _squeeze_sums(x, stats, bias, slope, blur), bias.contiguous()
    launch(_kernels().squeeze, grid, WARPS, (x, _or(stats, bias), bias, partial), numbers)
    return partial


@by_form
def _squeeze_cut(x: Tensor, processors: int, slope: float | None, blur: bool, normed: bool) -> _Cut:
    source = geometry(x, as_one_sample=False)
    shape = halved(x) if blur else source
    cut = plan(shape, processors * RESIDENT, blur, source=source)
    numbers = shape.p, shape.c, *_image(x, blur), *source.strides, cut.splits, cut.chunk
    activated = float(slope or 0), slope is not None
    return _launched(cut, shape.n * cut.splits, *numbers, *activated, blur, normed)


def _output(x: Tensor, blur: bool) -> Tensor:
    size = (*x.shape[:2], *blurred(x.shape)) if blur else x.shape
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=memory_format(x))


def _lines(x: Tensor) -> tuple[int, int, int, int]:
    """Return the direction of the bits of a dense `x`, the lines and their length."""
    n, p, c, strides, _ = geometry(x, as_one_sample=False)
    return (1, n, p, c) if strides[2] == 1 else (2, n, c, p)


def _bits(x: Tensor) -> Tensor:
    _, n, lines, length = _lines(x)
    return x.new_empty(n, lines, -(-length // 8), dtype=torch.uint8)


@operator(
    lambda x, stats, bias, gate, shortcut, slope, blur, keep_bits=False: (
        _output(x, blur),
        _bits(x) if keep_bits else _nothing(x),
    )
)
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
    """Return relu(gate * blur(act((x - mean) * scale + bias)) + shortcut), each part if requested.

    Without `stats`, mean is 0 and scale 1. With `keep_bits`, the mask of the ReLU is returned too,
    a bit for each value: (N, lines, ceil(length / 8)) bytes, see `_lines`.
    """
    parts = stats is not None, gate is not None, shortcut is not None, keep_bits
    grid, numbers, _ = _apply_cut(x, slope, blur, *parts)
    out, bits = _output(x, blur), _bits(x) if keep_bits else _no_values(x.device)
    bias = bias.contiguous()
    norm = x, _or(stats, bias), bias, _or(gate, x)
    if blur:
        launch(_kernels().apply_blurred, grid, WARPS, (*norm, out), numbers)
    else:
        launch(_kernels().apply, grid, WARPS, (*norm, _or(shortcut, x), out, bits), numbers)
    return out, bits


@by_form
def _apply_cut(
    x: Tensor, processors: int, slope: float | None, blur: bool, normed: bool, gated: bool,
    joins: bool, keep_bits: bool,
) -> _Cut:  # fmt: skip
    source = geometry(x, as_one_sample=not (blur or gated))
    shape = halved(x, times=2) if blur else source
    cut = plan(shape, processors * RESIDENT, blur, writes=True, source=source)
    activated, ends = (float(slope or 0), slope is not None, gated), (cut.splits, cut.chunk)
    if blur:
        strides = *source.strides, *geometry(_output(x, blur), as_one_sample=False).strides
        numbers = *_image(x, blur), *strides, *ends, *activated
        return _launched(cut, 0, shape.p, shape.c, *numbers, normed)
    bits = _lines(x)[0] if keep_bits else 0
    numbers = *source.strides, *ends, *activated, joins, bits, normed
    return _launched(cut, 0, shape.p, shape.c, *numbers)


def _grad_sums_outputs(
    grad: Tensor, second_grad: Any, x: Tensor, bits: Any, gate: Any, stats: Any, bias: Any,
    slope: Any, blur: bool, again: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    groups = _grad_sums_cut(x, slope, blur, gate is not None, False, False, False).groups
    kinds, writes = 2 if gate is None else 4, again or bits is not None
    partial = x.new_empty(groups, kinds, x.shape[1], dtype=torch.float32)
    return partial, torch.empty_like(x) if writes else _nothing(x)


@operator(_grad_sums_outputs)
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
    """Run backward's first pass: sums (groups, 2 or 4, C), and for a join the masked gradient.

    A join gives the `bits` of `apply`. If the output has two readers, the gradient is `grad +
    second_grad`, added in float32 and never written. Without join and blur, `again` writes the
    output of `apply` in place of that gradient.
    """
    gated = gate is not None
    switches = bits is not None, second_grad is not None, again
    grid, numbers, groups = _grad_sums_cut(x, slope, blur, gated, *switches)
    partial = x.new_empty(groups, 4 if gated else 2, x.shape[1], dtype=torch.float32)
    written = torch.empty_like(x) if again or bits is not None else _no_values(x.device)
    launch(
        _kernels().grad_sums, grid, WARPS,
        (
            grad, _or(second_grad, grad), x, _or(bits, x), _or(gate, stats), stats,
            bias.contiguous(), written, partial,
        ),
        numbers,
    )  # fmt: skip
    return partial, written


@by_form
def _grad_sums_cut(
    x: Tensor, processors: int, slope: float | None, blur: bool, gated: bool, bits: bool,
    second: bool, again: bool,
) -> _Cut:  # fmt: skip
    source, shape, cut = grad_cut(x, processors, gated, blur, sums=True)
    numbers = _grad_numbers(x, source, shape, cut, slope, blur)
    join = _lines(x)[0] if bits else 0
    return _launched(cut, shape.n * cut.splits, *numbers, blur, gated, join, second, again)


def _grad_numbers(
    x: Tensor, source: Geometry, shape: Geometry, cut: Plan, slope: float | None, blur: bool
) -> tuple[Any, ...]:
    """Return the arguments from P to HAS_ACT, which both passes of backward have."""
    strides = *source.strides, *geometry(_output(x, blur), as_one_sample=False).strides
    numbers = shape.p, shape.c, *_image(x, blur), *strides, cut.splits, cut.chunk
    return *numbers, float(slope or 0), slope is not None


@operator(lambda partial, gate, squeeze_grad, stats, count: torch.empty_like(stats))
def merge_grad_sums(
    partial: Tensor, gate: Tensor | None, squeeze_grad: Tensor | None, stats: Tensor, count: int
) -> Tensor:
    """Return gradients of weight and bias, k1 and k0, as (4, C): see the kernel."""
    (groups, _, channels), gated = partial.shape, gate is not None
    out = torch.empty_like(stats)
    splits = 1 if gate is None else groups // gate.shape[0]
    # the gate has six values a group and channel, otherwise there are two
    grid, tile = _merging(groups, channels, MERGE_TILE // (4 if gated else 1))
    launch(
        _kernels().merge_grad_sums, grid, MERGE_WARPS,
        (partial, _or(gate, stats), _or(squeeze_grad, stats), stats, out),
        (groups, channels, splits, float(count), gated, *tile),
    )  # fmt: skip
    return out


@operator(lambda grad, x, *_: torch.empty_like(x))
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
    """Run backward's second pass: return the gradient of `x`; merged is of `merge_grad_sums`."""
    grad_x = torch.empty_like(x)
    grid, numbers, _ = _grad_apply_cut(x, slope, blur, gate is not None, training)
    launch(
        _kernels().grad_apply, grid, WARPS,
        (
            grad, x, stats, bias.contiguous(), _or(gate, x), _or(squeeze_grad, x), merged, grad_x,
        ),
        numbers,
    )  # fmt: skip
    return grad_x


@by_form
def _grad_apply_cut(
    x: Tensor, processors: int, slope: float | None, blur: bool, gated: bool, training: bool
) -> _Cut:
    source, shape, cut = grad_cut(x, processors, gated, blur, sums=False)
    numbers = _grad_numbers(x, source, shape, cut, slope, blur)
    return _launched(cut, 0, *numbers, blur, gated, training)


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """Return `x`, or a tensor for an argument that the kernel does not read."""
    return other if x is None else x
