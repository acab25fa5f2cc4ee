"""Launches of the kernels of the activated batch norm; `reference` defines each public function.

A public function allocates its results and launches one or two kernels. `by_form` caches the grid
and the numeric arguments of a launch for each shape, strides and dtype of a map.
"""

from typing import Any

import torch
from torch import Tensor

from tresnet.ops.abn.types import Kept, Norm, Sums
from tresnet.ops.launching import Form, launch
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

# A multiprocessor of an H100 has registers for this many programs at once. For `grad_sums`, the
# number depends on (gated, blur). tests/ops/test_kernel_traffic.py checks these numbers.
RESIDENT = 8
SUMS_RESIDENT = {(False, False): 6, (True, False): 4, (False, True): 4, (True, True): 3}
RUNNING_CHANNELS, RUNNING_WARPS = 256, 4
MERGE_TILE, MERGE_WARPS = 4096, 8


def _pass(
    kernel: str, x: Tensor, shape: Geometry, source: Geometry, cut: Plan, slope: float | None,
    blur: bool, **switches: Any,
) -> Form:  # fmt: skip
    """Return the `Form` of a kernel that reads `x` as `source`; `cut` is the `Plan` for `shape`."""
    h, w, ho, wo = (*x.shape[-2:], *blurred(x.shape)) if blur else (1, 1, 1, 1)
    xn, xp, xc = source.strides
    on, op, oc = geometry(_output(x, blur), as_one_sample=False).strides if blur else (xn, xp, xc)
    return Form(
        f"abn.{kernel}", WARPS, (cut.programs,), P=shape.p, C=shape.c, H=h, W=w, HO=ho, WO=wo,
        xn=xn, xp=xp, xc=xc, on=on, op=op, oc=oc, slope=float(slope or 0),
        HAS_ACT=slope is not None, BLUR=blur, **switches, **cut._asdict(),
    )  # fmt: skip


def _merge(kernel: str, groups: int, tile: int, channels: int, **numbers: Any) -> Form:
    """Return the `Form` of a kernel that merges the results of `groups` chunks.

    Latency limits this kernel, not bandwidth. So a program covers few channels, and merges BG
    chunks at once. BG has one of two values, so that two compiled kernels serve all batch sizes.
    """
    bg = tile // (4 if groups > tile // 16 else 16)
    bc = min(tile // bg, 16)
    grid = (-(-channels // bc),)
    return Form(f"abn.{kernel}", MERGE_WARPS, grid, G=groups, C=channels, BG=bg, BC=bc, **numbers)


def _output(x: Tensor, blur: bool) -> Tensor:
    if not blur:
        return torch.empty_like(x)
    size = *x.shape[:2], *blurred(x.shape)
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=memory_format(x))


def statistics(y: Tensor, norm: Norm, *, per_sample: bool) -> tuple[Tensor, Tensor | None]:
    """Return the batch's mean, gamma * invstd, invstd and variance: (4, C) in float32.

    If `per_sample`, the second result (chunks, 2, C) holds each chunk's mean and sum of squared
    deviations. Running statistics are updated if `norm.momentum` is given and `norm.group` is None.
    """
    channels = y.shape[1]
    weight, *running = norm.vectors()
    groups, sums, merge = _moments(
        y, (weight.dtype, running[0].dtype, running[1].dtype), per_sample,
        norm.momentum if norm.group is None else None, norm.eps, MERGE_TILE,
    )  # fmt: skip
    stats = y.new_empty(4, channels, dtype=torch.float32)
    partial = stats.new_empty(groups, 2, channels)
    launch(sums, x=y, partial=partial)
    mean, var = running[0].contiguous(), running[1].contiguous()
    launch(
        merge, partial=partial, weight=weight.contiguous(), running_mean=mean, running_var=var,
        out=stats,
    )  # fmt: skip
    if merge.numbers["UPDATE"]:
        torch.autograd.graph.increment_version(running)
        for part, updated in zip(running, (mean, var), strict=True):
            if part is not updated:  # the kernel updated a copy, because `part` is not contiguous
                part.copy_(updated)
    return stats, partial if per_sample else None


@by_form
def _moments(
    x: Tensor, processors: int, per_sample: bool, momentum: float | None, eps: float, tile: int
) -> tuple[int, Form, Form]:  # fmt: skip
    shape = geometry(x, as_one_sample=not per_sample)
    cut = plan(shape, processors * RESIDENT)
    groups = shape.n * cut.splits
    sums = _pass("moments", x, shape, shape, cut, None, False)
    merge = _merge(
        "merge_moments", groups, tile, shape.c, P=shape.p, splits=cut.splits, chunk=cut.chunk,
        momentum=float(momentum or 0), eps=float(eps), UPDATE=momentum is not None,
    )  # fmt: skip
    return groups, sums, merge


def running_statistics(norm: Norm) -> Tensor:
    """Return mean, gamma * invstd, invstd and variance (4, C), from the running statistics."""
    weight, mean, var = (vector.contiguous() for vector in norm.vectors())
    stats = weight.new_empty(4, len(weight), dtype=torch.float32)
    form = _running(weight, (mean.dtype, var.dtype), norm.eps)
    launch(form, weight=weight, running_mean=mean, running_var=var, out=stats)
    return stats


@by_form
def _running(weight: Tensor, processors: int, eps: float) -> Form:
    channels, bc = len(weight), RUNNING_CHANNELS
    grid = (-(-channels // bc),)
    return Form("abn.running_moments", RUNNING_WARPS, grid, C=channels, eps=float(eps), BC=bc)


def squeeze(kept: Kept, norm: Norm) -> Tensor:
    """Return sums of the activated, blurred map over each chunk of each sample: (chunks, C).

    If `kept.stats` is None, the norm is folded: the activation is that of `kept.y + norm.beta`.
    """
    y, stats, bias = kept.y, kept.stats, norm.beta.contiguous()
    groups, form = _squeeze(y, bias.dtype, norm.slope, norm.blur, stats is not None)
    partial = y.new_empty(groups, y.shape[1], dtype=torch.float32)
    launch(form, x=y, stats=bias if stats is None else stats, bias=bias, partial=partial)
    return partial


@by_form
def _squeeze(
    x: Tensor, processors: int, slope: float | None, blur: bool, normed: bool
) -> tuple[int, Form]:
    source = geometry(x, as_one_sample=False)
    shape = halved(x) if blur else source
    cut = plan(shape, processors * RESIDENT, blur, source=source)
    form = _pass("squeeze", x, shape, source, cut, slope, blur, NORM=normed)
    return shape.n * cut.splits, form


def apply(
    kept: Kept, norm: Norm, shortcut: Tensor | None, *, keeps_bits: bool
) -> tuple[Tensor, Tensor | None]:
    """Return relu(gate * blur(act((y - mean) * scale + bias)) + shortcut), and the ReLU's mask.

    Operations that are not requested are left out. If `kept.stats` is None, mean is 0 and scale is
    1. Without `keeps_bits`, the mask is None. The mask is a tensor of bytes with a bit for each
    value. If the channels of a pixel are neighbours in memory, the mask has the shape
    (N, H*W, ceil(C / 8)). Otherwise it has the shape (N, C, ceil(H*W / 8)).
    """
    y, stats, gate, bias = kept.y, kept.stats, kept.gate, norm.beta.contiguous()
    form, size = _apply(
        y, bias.dtype, norm.slope, norm.blur, stats is not None, gate is not None,
        shortcut is not None, keeps_bits,
    )  # fmt: skip
    out = _output(y, norm.blur)
    stats, gate = bias if stats is None else stats, y if gate is None else gate
    if norm.blur:
        launch(form, x=y, stats=stats, bias=bias, gate=gate, out=out)
        return out, None
    bits = y.new_empty(size, dtype=torch.uint8) if keeps_bits else None
    launch(
        form, x=y, stats=stats, bias=bias, gate=gate, shortcut=y if shortcut is None else shortcut,
        out=out, bits=y if bits is None else bits,
    )  # fmt: skip
    return out, bits


@by_form
def _apply(
    x: Tensor, processors: int, slope: float | None, blur: bool, normed: bool, gated: bool,
    joins: bool, keeps_bits: bool
) -> tuple[Form, tuple[int, int, int]]:  # fmt: skip
    source = geometry(x, as_one_sample=not (blur or gated))
    shape = halved(x, times=2) if blur else source
    cut = plan(shape, processors * RESIDENT, blur, writes=True, source=source)
    along, n, lines, length = _lines(x)
    form = _pass(
        "apply_blurred" if blur else "apply", x, shape, source, cut, slope, blur, HAS_GATE=gated,
        JOIN=joins, BITS=along if keeps_bits else 0, NORM=normed,
    )  # fmt: skip
    return form, (n, lines, -(-length // 8))


def _lines(x: Tensor) -> tuple[int, int, int, int]:
    """Return the layout of the ReLU's mask: a code, N, lines in a sample, and values in a line.

    A line is a pixel's channels (code 1) or a channel's pixels (code 2); a byte holds 8 values.
    """
    n, p, c, strides, _ = geometry(x, as_one_sample=False)
    return (1, n, p, c) if strides[2] == 1 else (2, n, c, p)


def grad_sums(
    grad: Tensor, second: Tensor | None, kept: Kept, norm: Norm, *, rebuilds: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the sums of backward's first pass (chunks, 2 or 4, C), and a map or None.

    If `kept.bits` is given, the map is the gradient masked by the ReLU. If `rebuilds`, the map is
    the recomputed output. If `second` is given, it is added to the gradient `grad` in float32.
    """
    y, bits, gate, stats = kept.y, kept.bits, kept.gate, kept.stats
    assert stats is not None
    bias = norm.beta.contiguous()
    size, form = _grad_sums(
        y, bias.dtype, norm.slope, norm.blur, gate is not None, bits is not None,
        second is not None, rebuilds,
    )  # fmt: skip
    partial = stats.new_empty(size)
    written = torch.empty_like(y) if rebuilds or bits is not None else None
    launch(
        form, grad=grad, second_grad=grad if second is None else second, x=y,
        bits=y if bits is None else bits, gate=stats if gate is None else gate, stats=stats,
        bias=bias, written=y if written is None else written, partial=partial,
    )  # fmt: skip
    return partial, written


@by_form
def _grad_sums(
    x: Tensor, processors: int, slope: float | None, blur: bool, gated: bool, joins: bool,
    second: bool, rebuilds: bool
) -> tuple[tuple[int, int, int], Form]:  # fmt: skip
    source, shape, cut = _grad_cut(x, processors, gated, blur, sums=True)
    form = _pass(
        "grad_sums", x, shape, source, cut, slope, blur, HAS_GATE=gated,
        JOIN=_lines(x)[0] if joins else 0, SECOND=second, AGAIN=rebuilds,
    )  # fmt: skip
    return (shape.n * cut.splits, 4 if gated else 2, shape.c), form


def _grad_cut(
    x: Tensor, processors: int, gated: bool, blur: bool, *, sums: bool
) -> tuple[Geometry, Geometry, Plan]:
    """Return the `Geometry` of `x`, the `Geometry` of the output, and the `Plan` of the output."""
    source = geometry(x, as_one_sample=not (blur or gated))
    shape = halved(x) if blur else source
    resident = SUMS_RESIDENT[gated, blur] if sums else RESIDENT
    cut = plan(shape, processors * resident, blur, not sums, source, maps=1 + sums)
    return source, shape, cut


def merge_grad_sums(partial: Tensor, squeeze_grad: Tensor | None, kept: Kept) -> Tensor:
    """Return `Sums.merged` (4, C), from the sums of all chunks."""
    y, gate, stats = kept.y, kept.gate, kept.stats
    assert stats is not None
    merged = torch.empty_like(stats)
    launch(
        _merged(y, None, len(partial), gate is not None, MERGE_TILE), partial=partial,
        gate=stats if gate is None else gate,
        squeeze_grad=stats if squeeze_grad is None else squeeze_grad, stats=stats, out=merged,
    )  # fmt: skip
    return merged


@by_form
def _merged(x: Tensor, processors: int, groups: int, gated: bool, tile: int) -> Form:
    n, channels = x.shape[:2]
    # for each group and channel, the kernel loads six values with a gate, and two without a gate
    return _merge(
        "merge_grad_sums", groups, tile // (4 if gated else 1), channels, HAS_GATE=gated,
        splits=groups // n if gated else 1, count=float(x.numel() // channels),
    )  # fmt: skip


def grad_apply(grad: Tensor, kept: Kept, norm: Norm, sums: Sums) -> Tensor:
    """Run backward's second pass: return the gradient of `kept.y`."""
    y, gate, term, stats = kept.y, kept.gate, sums.squeeze_grad, kept.stats
    assert stats is not None
    grad_x, bias = torch.empty_like(y), norm.beta.contiguous()
    launch(
        _grad_apply(y, bias.dtype, norm.slope, norm.blur, gate is not None, norm.training),
        grad=grad, x=y, stats=stats, bias=bias, gate=y if gate is None else gate,
        squeeze_grad=y if term is None else term, merged=sums.merged, grad_x=grad_x,
    )  # fmt: skip
    return grad_x


@by_form
def _grad_apply(
    x: Tensor, processors: int, slope: float | None, blur: bool, gated: bool, training: bool
) -> Form:  # fmt: skip
    source, shape, cut = _grad_cut(x, processors, gated, blur, sums=False)
    return _pass(
        "grad_apply", x, shape, source, cut, slope, blur, HAS_GATE=gated, TRAINING=training
    )
