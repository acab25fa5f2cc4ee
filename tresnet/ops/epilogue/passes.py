"""Launches of the kernels of batch norm, blur, and squeeze and excitation.

A public function allocates its results and launches one or two kernels. `PASSES` has an entry for
each kernel that reads a whole feature map. From such an entry, `_pass` makes a `LaunchSpec`, which
is cached for each shape and dtype of a map.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tresnet.ops.epilogue.types import Epilogue, FirstPass, Saved, SEWeights
from tresnet.ops.launching import LaunchSpec, launch
from tresnet.ops.tiles import (
    WARPS,
    WIDEST_LOAD,
    Tiling,
    blurred,
    cached_per_layout,
    divide,
    multiprocessors,
    power,
)


class Pass(NamedTuple):
    """Settings for the division of a feature map among the Triton programs of a kernel.

    Attributes:
        resident: Numbers of programs for which an H100's multiprocessor has registers: with
            two sums, and with the four of an SE. tests/ops/test_kernel_traffic.py checks them.
        halvings: Chunks consist of the pixels that are left after this number of blurs.
        writes: Whether the kernel only writes a map; otherwise the kernel computes sums.
        maps: Number of maps that the kernel reads, if the kernel computes sums.
    """

    resident: tuple[int, int] = (8, 8)
    halvings: int = 0
    writes: bool = False
    maps: int = 1


PASSES = {
    "statistics_kernels.moments": Pass(),
    "pointwise_kernels.squeeze": Pass(),
    "blurred_kernels.squeeze_blurred": Pass(halvings=1),
    "pointwise_kernels.apply": Pass(writes=True),
    "blurred_kernels.apply_blurred": Pass(halvings=2, writes=True),
    "pointwise_kernels.grad_sums": Pass((6, 4), maps=2),
    "blurred_kernels.grad_sums_blurred": Pass((4, 3), halvings=1, maps=2),
    "pointwise_kernels.grad_apply": Pass(writes=True),
    "blurred_kernels.grad_apply_blurred": Pass(halvings=1, writes=True),
}
MERGE_TILE, MERGE_CHANNELS, MERGE_WARPS = 4096, 4, 8
# A reduction of maps with at least 256 channels has at most about 50 chunks on an H100, because
# many of its programs cover other channels. `apply` then merges their moments, 64 chunks at once.
# Up to 80 registers a thread let a multiprocessor run six programs of `apply` at once, and three of
# `moments`, which have twice the warps.
MERGED_WIDTH, MERGED_CHUNKS, MERGED_RESIDENT = 256, 64, 6
# A program of the SE's layers covers 16 samples, the least for a product by tensor cores. So a
# batch of 256 has 16 programs, and each has a multiprocessor to itself. A program loops over tiles
# of up to 64 channels, and all hidden units up to 256; more are divided into blocks of 128. A tile
# has at most 8192 weights, so a program takes at most 98 KiB of shared memory. All GPUs of
# capability 8.0 or later have 99 KiB.
SE_SAMPLES, SE_CHANNELS, SE_HIDDEN, SE_TILE = 16, 64, 256, 8192
# A program of `excite_map` covers a sample, at most 128 KiB in 16 bits. An H100's multiprocessor
# has registers for two programs, so a batch of 256 runs at once. Each program reads all weights of
# the SE, so these are at most half of the largest map. Channels fit into a tile.
SE_MAP, SE_MAP_TILE, SE_MAP_WARPS = 65536, 4096, 8  # values of a sample and of a tile, and warps
SE_MAP_WEIGHTS = 32768  # of one of the two layers
SE_WEIGHTS_TILE = 32, 32  # a program loads 32 samples at once, for gradients of 32 x 32 weights


class ChunkSums(NamedTuple):
    """Sums over each chunk of a tiling: (G, C), or (G, K, C) for K sums."""

    values: Tensor
    tiling: Tiling


@cached_per_layout
def _pass(
    x: Tensor, kernel: str, slope: float | None, per_sample: bool, se: bool = False,
    merges: bool = False, moments: Tiling | None = None, eps: float = 0.0,
) -> tuple[LaunchSpec, Tiling]:  # fmt: skip
    """Return the `LaunchSpec` of a kernel of `PASSES` for a map `x`, and the tiling of `x`.

    Each chunk lies in one sample if `per_sample` is true, as for a gate, or if the kernel has a
    blur. With `se`, the kernel `grad_sums` computes four sums in place of two. With `merges`, the
    kernel `apply` merges the moments of chunks; `moments` is their tiling.
    """
    resident, halvings, writes, maps = PASSES[kernel]
    programs = multiprocessors(x.device) * (MERGED_RESIDENT if merges else resident[se])
    tiling = divide(
        x, programs, halvings=halvings, writes=writes, maps=maps,
        per_sample=per_sample or halvings > 0, merges=merges,
    )  # fmt: skip
    (h, w), (ho, wo) = x.shape[-2:], blurred(x.shape)
    merged, scalars = moments or tiling, tiling._asdict()
    spec = LaunchSpec(
        f"epilogue.{kernel}", 2 * WARPS if merges and not writes else WARPS, (tiling.programs,),
        H=h, W=w, HO=ho, WO=wo, SUMS=4 if se else 2, BG=MERGED_CHUNKS, eps=float(eps),
        slope=None if slope is None else float(slope), **scalars | {"G": merged.G},
        merged=merged.chunk,
    )  # fmt: skip
    return spec, tiling


@cached_per_layout
def _merge(x: Tensor, kernel: str, tile: int, tiling: Tiling, eps: float) -> LaunchSpec:
    """Return the `LaunchSpec` of the kernel that merges the sums of all chunks.

    Latency limits this kernel, not bandwidth. So a program covers only four channels, and merges
    many chunks at once. One compiled kernel serves all batch sizes.
    """
    channels = x.shape[1]
    scalars = tiling._replace(BC=MERGE_CHANNELS)._asdict()
    return LaunchSpec(
        f"epilogue.statistics_kernels.{kernel}", MERGE_WARPS, (-(-channels // MERGE_CHANNELS),),
        BG=tile // MERGE_CHANNELS, eps=float(eps), count=float(x.numel() // channels), **scalars,
    )  # fmt: skip


def _kernel(name: str, epilogue: Epilogue) -> str:
    return f"blurred_kernels.{name}_blurred" if epilogue.blur else f"pointwise_kernels.{name}"


def statistics(
    y: Tensor, epilogue: Epilogue, *, per_sample: bool, merges: bool = False
) -> tuple[Tensor, ChunkSums]:
    """Return `Epilogue.stats` of the batch, and the moments of each chunk.

    The moments (G, 2, C) are mean and sum of squared deviations of a chunk. With `per_sample`,
    chunks lie in one sample. With `merges`, `apply` merges the moments and writes the statistics.
    """
    spec, tiling = _pass(y, "statistics_kernels.moments", None, per_sample, False, merges)
    stats = y.new_empty(4, y.shape[1], dtype=torch.float32)
    partial = stats.new_empty(tiling.G, 2, y.shape[1])
    launch(spec, x=y, partial=partial)
    if not merges:
        merge = _merge(y, "merge_moments", MERGE_TILE, tiling, epilogue.eps)
        launch(merge, partial=partial, weight=epilogue.gamma, out=stats)
    return stats, ChunkSums(partial, tiling)


def squeeze(saved: Saved, epilogue: Epilogue) -> ChunkSums:
    """Return sums (G, C) of the activated, blurred map over each chunk of each sample."""
    y, stats, bias = saved.y, saved.stats, epilogue.beta
    spec, tiling = _pass(y, _kernel("squeeze", epilogue), epilogue.slope, True)
    partial = y.new_empty(tiling.G, y.shape[1], dtype=torch.float32)
    launch(spec, x=y, stats=stats, bias=bias, partial=partial)
    return ChunkSums(partial, tiling)


def apply(
    saved: Saved, epilogue: Epilogue, shortcut: Tensor | None, *, needs_mask: bool,
    moments: ChunkSums | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return relu(gate * blur(act((y - mean) * scale + bias)) + shortcut), and `Saved.mask`.

    If `saved.stats` is None, mean is 0 and scale is 1. Without `needs_mask`, the mask is None. With
    `moments`, from `statistics` with `merges`, `saved.stats` is written, not read.
    """
    y, stats, gate, bias = saved.y, saved.stats, saved.gate, epilogue.beta
    partial, tiling = moments or (None, None)
    merging = (False, True, tiling, epilogue.eps) if moments else ()
    spec, _ = _pass(y, _kernel("apply", epilogue), epilogue.slope, gate is not None, *merging)
    if epilogue.blur:
        n, c, (h, w) = *y.shape[:2], blurred(y.shape)
        out = y.new_empty(n, h, w, c).permute(0, 3, 1, 2)
        launch(spec, x=y, stats=stats, bias=bias, gate=gate, out=out)
        return out, None
    out = torch.empty_like(y)
    size = len(y), y.shape[2:].numel(), -(-y.shape[1] // 8)
    mask = y.new_empty(size, dtype=torch.uint8) if needs_mask else None
    launch(
        spec, x=y, partial=partial, weight=epilogue.gamma if moments else None, stats=stats,
        bias=bias, gate=gate, shortcut=shortcut, mask=mask, out=out,
    )  # fmt: skip
    return out, mask


def grad_sums(
    grad: Tensor, second: Tensor | None, saved: Saved, epilogue: Epilogue, *, rebuilds: bool
) -> tuple[ChunkSums, Tensor | None, Tensor | None]:
    """Return sums (G, 2 or 4, C) of backward's first pass, masked gradient, recomputed output.

    Without `saved.mask`, there is no masked gradient. Without `rebuilds`, there is no recomputed
    output. With a blur, there is neither, and `second` must be None.
    """
    y, mask, per_sample, se = saved.y, saved.mask, saved.gate is not None, epilogue.se is not None
    spec, tiling = _pass(y, _kernel("grad_sums", epilogue), epilogue.slope, per_sample, se)
    partial = y.new_empty(tiling.G, spec.scalars["SUMS"], y.shape[1], dtype=torch.float32)
    read = {"stats": saved.stats, "bias": epilogue.beta}
    if epilogue.blur:
        launch(spec, grad=grad, x=y, **read, partial=partial)
        return ChunkSums(partial, tiling), None, None
    masked_grad = None if mask is None else torch.empty_like(y)
    rebuilt = torch.empty_like(y) if rebuilds else None
    launch(
        spec, grad=grad, second_grad=second, x=y, mask=mask, gate=saved.gate, **read,
        masked_grad=masked_grad, rebuilt=rebuilt, partial=partial,
    )  # fmt: skip
    return ChunkSums(partial, tiling), masked_grad, rebuilt


def merge_grad_sums(sums: ChunkSums, saved: Saved) -> Tensor:
    """Return `FirstPass.norm_grads` (4, C), without SE, from the sums of all chunks."""
    (partial, tiling), gate, stats = sums, saved.gate, saved.stats
    tile = MERGE_TILE if gate is None else MERGE_TILE // 2  # a gate is a third load
    spec = _merge(saved.y, "merge_grad_sums", tile, tiling, 0.0)
    norm_grads = partial.new_empty(4, partial.shape[2])
    launch(spec, partial=partial, gate=gate, stats=stats, out=norm_grads)
    return norm_grads


def gradient(grad: Tensor, epilogue: Epilogue, saved: Saved, sums: FirstPass) -> Tensor:
    """Run the second pass of backward: return the gradient of `saved.y`.

    `grad` is the gradient of the output, or `sums.masked_grad` if forward added a shortcut.
    """
    y, gate = saved.y, saved.gate
    spec, _ = _pass(y, _kernel("grad_apply", epilogue), epilogue.slope, gate is not None)
    grad_x = torch.empty_like(y)
    norm_grads = sums.norm_grads if epilogue.of_batch else None
    launch(
        spec, grad=grad, x=y, gate=gate, squeeze_grad=sums.squeeze_grad, stats=saved.stats,
        bias=epilogue.beta, norm_grads=norm_grads, grad_x=grad_x,
    )  # fmt: skip
    return grad_x


def fits_one_program(channels: int, size: Sequence[int], reduced: int) -> bool:
    """Return whether `excite_map` may run an SE with `reduced` hidden units on a map (H, W)."""
    fits = channels * math.prod(size) <= SE_MAP and channels * reduced <= SE_MAP_WEIGHTS
    return fits and channels <= SE_MAP_TILE


def excite_map(saved: Saved, epilogue: Epilogue) -> tuple[Tensor, Saved]:
    """Return the output and `saved` with the SE's tensors, without blur and shortcut."""
    y, se = saved.y, epilogue.se
    assert se is not None
    (samples, channels), reduced = y.shape[:2], se.fc1_weight.shape[0]
    out, sizes = torch.empty_like(y), (channels, reduced, channels)
    of_se = [y.new_empty(samples, size, dtype=torch.float32) for size in sizes]
    squeezed, hidden, gate = of_se
    launch(
        _excite_map(y, epilogue.slope, reduced), x=y, stats=saved.stats, bias=epilogue.beta,
        **se._asdict(), squeezed=squeezed, hidden=hidden, gate=gate, out=out,
    )  # fmt: skip
    return out, saved._replace(gate=gate, squeezed=squeezed, hidden=hidden)


@cached_per_layout
def _excite_map(x: Tensor, slope: float | None, reduced: int) -> LaunchSpec:
    n, channels, *size = x.shape
    bc, ac = power(channels, 2 * channels), math.gcd(channels, WIDEST_LOAD // x.itemsize)
    return LaunchSpec(
        "epilogue.excite_kernels.excite_map", SE_MAP_WARPS, (n,), P=math.prod(size), C=channels,
        R=reduced, slope=None if slope is None else float(slope),
        BP=max(SE_MAP_TILE // bc, 1), BC=bc, BR=max(SE_MAP_TILE // bc, 1), AC=ac,
        AR=math.gcd(reduced, 4),
    )  # fmt: skip


def excite(
    sums: ChunkSums, saved: Saved, epilogue: Epilogue, *, linear: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the squeezed maps (N, C), the hidden layer (N, R) and the gate (N, C), all float32.

    `sums` is the result of `squeeze`. With `linear`, there is no activation or blur before the SE,
    and `sums` is the second result of `statistics`.
    """
    (partial, tiling), se = sums, epilogue.se
    assert se is not None
    samples, channels = saved.y.shape[:2]
    squeezed, gate = partial.new_empty(samples, channels), partial.new_empty(samples, channels)
    reduced = se.fc1_weight.shape[0]
    hidden = partial.new_empty(samples, reduced)
    spec = _excite(saved.y, reduced, tiling, linear)
    launch(
        spec, partial=partial, stats=saved.stats if linear else None, bias=epilogue.beta,
        **se._asdict(), squeezed=squeezed, hidden=hidden, gate=gate,
    )  # fmt: skip
    return squeezed, hidden, gate


def _se_launch(
    kernel: str, sums: int, x: Tensor, reduced: int, splits: int, **scalars: Any
) -> LaunchSpec:
    """Return the `LaunchSpec` of `excite` or `excite_grads`; `sums` is the number of sums it reads.

    A thread loads 16 times four sums of chunks at once. With 64 hidden units, eight warps would
    spill registers.
    """
    n, channels = x.shape[:2]
    br = power(max(reduced, SE_SAMPLES), SE_HIDDEN) if reduced <= SE_HIDDEN else SE_HIDDEN // 2
    warps = 4 if br <= 64 else 8
    return LaunchSpec(
        f"epilogue.excite_kernels.{kernel}", warps, (-(-n // SE_SAMPLES),), N=n, C=channels,
        R=reduced, splits=splits, BN=SE_SAMPLES, BS=8 // sums, BX=16 * warps,
        BC=min(SE_TILE // br, SE_CHANNELS), BR=br, NB=-(-reduced // br),
        AC=math.gcd(channels, 4), AR=math.gcd(reduced, 4), **scalars,
    )  # fmt: skip


@cached_per_layout
def _excite(x: Tensor, reduced: int, tiling: Tiling, linear: bool) -> LaunchSpec:
    pixels = {"P": tiling.P, "chunk": tiling.chunk}
    return _se_launch("excite", 1, x, reduced, tiling.splits, LINEAR=linear, **pixels)


def excite_grads(
    sums: ChunkSums, saved: Saved, epilogue: Epilogue
) -> tuple[Tensor, SEWeights, Tensor]:
    """Return `squeeze_grad`, the gradients of the SE's parameters, and `norm_grads`.

    `sums` is the first result of `grad_sums`. The gradients of the SE's weights and biases have
    the dtypes of these.
    """
    (partial, tiling), se = sums, epilogue.se
    gate: Any = saved.gate if saved.se_gate is None else saved.se_gate
    hidden: Any = saved.hidden
    assert se is not None
    grad_logit, grad_hidden = torch.empty_like(gate), torch.empty_like(hidden)
    squeeze_grad, grads = torch.empty_like(gate), SEWeights(*map(torch.empty_like, se))
    norm_grads = partial.new_empty(4, partial.shape[2])
    of_maps, of_weights = _excite_grads(saved.y, hidden.shape[1], tiling, MERGE_TILE)
    launch(
        of_maps, partial=partial, drop_path_scale=saved.drop_path_scale, stats=saved.stats,
        bias=epilogue.beta, gate=gate, hidden=hidden, fc1_weight=se.fc1_weight,
        fc2_weight=se.fc2_weight, grad_logit=grad_logit, grad_hidden=grad_hidden,
        squeeze_grad=squeeze_grad,
    )  # fmt: skip
    launch(
        of_weights, squeezed=saved.squeezed, hidden=hidden, grad_logit=grad_logit,
        grad_hidden=grad_hidden, partial=partial, gate=saved.gate, squeeze_grad=squeeze_grad,
        stats=saved.stats, **grads._asdict(), norm_grads=norm_grads,
    )  # fmt: skip
    return squeeze_grad, grads, norm_grads


@cached_per_layout
def _excite_grads(
    x: Tensor, reduced: int, tiling: Tiling, tile: int
) -> tuple[LaunchSpec, LaunchSpec]:
    n, channels = x.shape[:2]
    of_maps = _se_launch("excite_grads", 2, x, reduced, tiling.splits, count=float(tiling.P))
    samples, side = SE_WEIGHTS_TILE
    squares = -(-channels // side) * -(-reduced // side)
    of_weights = LaunchSpec(
        "epilogue.excite_kernels.excite_weight_grads", 4, (max(squares, -(-channels // 4)), 3),
        N=n, C=channels, R=reduced, G=tiling.G, splits=tiling.splits,
        count=float(x.numel() // channels), BN=samples, BW=side, AC=math.gcd(channels, 4),
        AR=math.gcd(reduced, 4), BG=tile // 16, BC=4,  # six loads, not two
    )  # fmt: skip
    return of_maps, of_weights
