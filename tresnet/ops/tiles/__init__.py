"""How the Triton kernels see a batch of feature maps, and how their work is cut.

A batch is (n, p, c): sample, pixel, channel, with one stride each, so that one kernel reads
channels_last and contiguous memory along its contiguous direction. Tiles give each of 128 threads
16 values, or 8. Reductions are cut into as many programs as a GPU runs at once, or a few times as
many. Programs are numbered with the channels first: those that share sectors of memory, because a
row's bytes are no multiple of 32, run next to each other.
"""

import functools
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

CutT = TypeVar("CutT")

# Values of a tile; the blur's, of 16 bits and side by side in memory: several of its pixels are in
# registers at once, which would spill at 2048, at 1024 in float32, and at 512 where each is loaded
# alone.
TILE, BLUR_TILE = 2048, 1024
WARPS = 4
CHANNELS = 64  # of a tile, and as many side by side are 128 bytes in 16 bits
MOST_TILES = 4  # of one program that writes: enough to share the loads of the channels' factors
WIDEST_LOAD = 16  # bytes
MULTIPROCESSORS = 132  # of an H100, where there is no GPU


class Geometry(NamedTuple):
    """A tensor as (samples, pixels, channels), a stride each, in elements of `itemsize` bytes."""

    n: int
    p: int
    c: int
    strides: tuple[int, int, int]
    itemsize: int


class Plan(NamedTuple):
    """How a tensor is cut, and what the kernels are launched with.

    Attributes:
        splits: chunks of a sample.
        chunk: pixels of a chunk.
        programs: one for each chunk of each sample and each tile's width of channels.
        tile: the last arguments of every launch. BP and BC, pixels and channels of a tile; AP and
            AC, what the numbers of pixels and of channels are known to be divisible by, which lets
            a thread load as many values at once: Triton itself sees only whether an argument is
            divisible by 16.
        warps: of a program.
    """

    splits: int
    chunk: int
    programs: int
    tile: tuple[int, int, int, int]
    warps: int


def interpreted() -> bool:
    """Whether Triton was told to interpret its kernels, so that they run on a CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def memory_format(x: Tensor) -> torch.memory_format:
    """The dense format `x` is in, or is nearest to."""
    if x.dim() == 4 and not x.is_contiguous() and x.stride(1) == 1:
        return torch.channels_last
    return torch.contiguous_format


def dense(x: Tensor, like: Tensor | None = None) -> Tensor:
    """`x` in the memory format of a dense `like` (its own if None), copied only if in another.

    A contiguous map of an odd number of pixels, as 7x7, goes on in channels_last: a thread would
    load one of its values at a time, where its channels allow several.
    """
    if not torch.compiler.is_compiling() and _is_dense(x, like):
        return x
    if like is None and _is_odd(x):
        return x.contiguous(memory_format=torch.channels_last)
    return x.contiguous(memory_format=memory_format(x if like is None else like))


def _is_odd(x: Tensor) -> bool:
    return x.dim() == 4 and x.shape[2] * x.shape[3] % 2 == 1 and x.shape[1] % 2 == 0


def _is_dense(x: Tensor, like: Tensor | None) -> bool:
    """Whether `dense` has nothing to do: quicker than letting PyTorch find out."""
    if like is None:
        if x.is_contiguous(memory_format=torch.channels_last):
            return True
        return x.is_contiguous() and not _is_odd(x)
    return x.stride() == like.stride() and x.shape == like.shape


def by_form(cut: Callable[..., CutT]) -> Callable[..., CutT]:
    """Remember what `cut` returned, which takes longer than a launch.

    Its first argument is a tensor of which it looks at shape, strides and dtype alone, its second
    the number of multiprocessors, which the function that is returned finds out.
    """

    @functools.lru_cache(maxsize=4096)
    def known(
        shape: torch.Size,
        stride: tuple[int, ...],
        dtype: torch.dtype,
        limits: tuple[int, ...],
        *rest: Any,
    ) -> CutT:
        return cut(torch.empty_strided(shape, stride, dtype=dtype, device="meta"), *rest)

    @functools.wraps(cut)
    def run(x: Tensor, *rest: Any) -> CutT:
        if type(x) is not Tensor and any(isinstance(size, torch.SymInt) for size in x.shape):
            return cut(x, multiprocessors(x.device), *rest)  # of sizes the compiler leaves open
        limits = (TILE, BLUR_TILE, WARPS, CHANNELS, MOST_TILES)
        return known(x.shape, x.stride(), x.dtype, limits, multiprocessors(x.device), *rest)

    return run


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many a device has; it never changes, so that sums are always taken in one order."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def geometry(x: Tensor, whole_batch: bool) -> Geometry:
    """How the kernels see a dense tensor (N, C, ...).

    Args:
        x: as `dense` returns it.
        whole_batch: the samples need not be told apart.
    """
    n, c = x.shape[:2]
    p = x.numel() // (n * c)
    if p > 1 and memory_format(x) is torch.contiguous_format:
        return Geometry(n, p, c, (c * p, 1, p), x.itemsize)
    if whole_batch:
        return Geometry(1, n * p, c, (0, c, 1), x.itemsize)
    return Geometry(n, p, c, (p * c, c, 1), x.itemsize)


def halved(x: Tensor, times: int = 1) -> Geometry:
    """A dense `x`, samples told apart, with the pixels it has after as many blurs."""
    shape = geometry(x, whole_batch=False)
    size = x.shape
    for _ in range(times):
        size = blurred(size)
    p = math.prod(size)
    along_p = shape.strides[1] == 1
    return shape._replace(
        p=p, strides=(shape.c * p, 1, p) if along_p else (shape.c * p, shape.c, 1)
    )


def power(value: int, most: int) -> int:
    """The least power of two that is at least `value`, but at most `most`."""
    return min(1 << max(value - 1, 0).bit_length(), most)


def tile(shape: Geometry, blur: bool = False, maps: int = 1) -> tuple[int, int]:
    """Pixels and channels of a tile, longest along contiguous memory; fewer for several `maps`."""
    values = TILE if maps == 1 else TILE // 2
    if blur:
        alone = shape.strides[2] > 1 or shape.c % 2 > 0
        values = BLUR_TILE // 4 if alone else BLUR_TILE * 2 // shape.itemsize // maps
    if shape.strides[2] == 1:
        # wider only where no thread is without a channel
        bc = power(shape.c, max(math.gcd(shape.c, CHANNELS), 64))
        columns = -(-shape.c // bc)
        if bc > 32 and shape.c < 0.8 * columns * bc and -(-shape.c // 32) < 2 * columns:
            bc = 32  # more than a fifth of the wider tiles' threads would have no channel
        return power(shape.p, max(values // bc, 1)), bc
    bp = power(shape.p, values)
    return bp, power(shape.c, values // bp)


def plan(
    shape: Geometry,
    places: int,
    blur: bool = False,
    writes: bool = False,
    source: Geometry | None = None,
    maps: int = 1,
) -> Plan:
    """Cut the pixels of each sample into chunks, one a program.

    Args:
        shape: what is cut.
        places: programs that run at once.
        blur: the kernel has the blur's index arithmetic.
        writes: the kernel writes a map: a chunk has `MOST_TILES` at most. One of a reduction leaves
            partial sums, and is as long as `places` allow.
        source: what is read, if not of this shape: its channels may be apart where those of a
            single pixel, written, are not.
        maps: that a reduction reads.
    """
    bp, bc = tile(shape, blur, maps)
    columns = -(-shape.c // bc)
    tiles = _tiles_of_chunk(-(-shape.p // bp), shape.n * columns, places)
    # shorter, the partial sums would outweigh what is read
    tiles = min(tiles, MOST_TILES) if writes else max(tiles, TILE // (bp * bc))
    chunk = tiles * bp
    splits = -(-shape.p // chunk)
    widest = WIDEST_LOAD // shape.itemsize
    along_c = shape.strides[2] == (source or shape).strides[2] == 1
    # the blur's pixels are no neighbours in memory
    ap = 1 if along_c or blur else math.gcd(shape.p, widest)
    ac = math.gcd(shape.c, widest) if along_c else 1
    return Plan(splits, chunk, shape.n * splits * columns, (bp, bc, ap, ac), WARPS)


def _tiles_of_chunk(tiles: int, rows: int, places: int) -> int:
    """How many of each row's `tiles` a program takes, so that all are done soonest.

    Programs run in waves of `places`; each takes about a tile's time to begin and end.
    """
    chunks = (-(-tiles // max(waves * places // rows, 1)) for waves in range(1, 5))
    return min(chunks, key=lambda chunk: -(-rows * -(-tiles // chunk) // places) * (chunk + 1))


def blurred(size: tuple[int, ...] | torch.Size) -> tuple[int, int]:
    """Height and width after the blur, from (..., H, W)."""
    return (size[-2] + 1) // 2, (size[-1] + 1) // 2
