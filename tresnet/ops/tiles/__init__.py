"""The kernels' view of a batch of feature maps, and its division into programs and tiles.

A batch is (n, p, c): sample, pixel, channel, with one stride each. So one kernel reads both
channels_last and contiguous memory along its contiguous direction. A program covers a chunk of
pixels of one sample, and a tile's width of channels; it goes through the chunk in tiles. A tile
gives each of 128 threads 16 values, or 8. Reductions have as many programs as a GPU runs at once,
or a few times as many. Programs are ordered with the channels first, as neighbours share sectors of
memory if a row's bytes are no multiple of 32.
"""

import functools
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

CutT = TypeVar("CutT")

# Values of a tile, and of the blur's in 16 bits with neighbours in memory. The blur has several
# pixels in registers at once. With 2048 values they would spill, in float32 with 1024, and with 512
# if each value is loaded alone.
TILE, BLUR_TILE = 2048, 1024
WARPS = 4
CHANNELS = 64  # of a tile, and as many side by side are 128 bytes in 16 bits
MOST_TILES = 4  # of one program that writes: enough to share the loads of the channels' factors
WIDEST_LOAD = 16  # bytes
MULTIPROCESSORS = 132  # of an H100, where there is no GPU


class Geometry(NamedTuple):
    """A tensor as (samples, pixels, channels) with strides in elements of `itemsize` bytes."""

    n: int
    p: int
    c: int
    strides: tuple[int, int, int]
    itemsize: int


class Plan(NamedTuple):
    """Division of a tensor into programs: their number, and arguments of the kernels.

    Each sample has `splits` chunks of `chunk` pixels. A tile has BP pixels and BC channels. AP
    divides the number of pixels and AC that of channels, so that a thread may load AP or AC values
    at once. Triton itself detects only divisibility by 16.
    """

    programs: int
    splits: int
    chunk: int
    BP: int
    BC: int
    AP: int
    AC: int


def interpreted() -> bool:
    """Return whether Triton interprets its kernels, so that they run on a CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def memory_format(x: Tensor) -> torch.memory_format:
    """Return the dense format that `x` is in, or the nearest."""
    if x.dim() == 4 and not x.is_contiguous() and x.stride(1) == 1:
        return torch.channels_last
    return torch.contiguous_format


def dense(x: Tensor, like: Tensor | None = None) -> Tensor:
    """Return `x` in the memory format of a dense `like` (None: its own), copied only if needed."""
    if like is not None:
        if x.stride() == like.stride() and x.shape == like.shape:
            return x
        return x.contiguous(memory_format=memory_format(like))
    if x.is_contiguous(memory_format=torch.channels_last):
        return x
    return x.contiguous(memory_format=torch.channels_last if _is_odd(x) else memory_format(x))


def _is_odd(x: Tensor) -> bool:
    return x.dim() == 4 and x.shape[2] * x.shape[3] % 2 == 1 and x.shape[1] % 2 == 0


def by_form(cut: Callable[..., CutT]) -> Callable[..., CutT]:
    """Cache the results of `cut`, which takes longer than a launch.

    The first argument of `cut` is a tensor of which it may read only shape, strides and dtype. The
    second is the number of multiprocessors. In its place the returned function takes the dtypes of
    the launch's other tensors, as far as they may differ.
    """

    @functools.lru_cache(maxsize=4096)
    def known(
        shape: torch.Size,
        stride: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        dtypes: Any,
        limits: Any,
        *rest: Any,
    ) -> CutT:
        # A step's trace must not depend on which forms are cached.
        with _disable_current_modes():
            x = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            return cut(x, multiprocessors(device), *rest)

    @functools.wraps(cut)
    def run(x: Tensor, dtypes: Any, *rest: Any) -> CutT:
        limits = TILE, BLUR_TILE, multiprocessors  # which tests replace
        return known(x.shape, x.stride(), x.dtype, x.device, dtypes, limits, *rest)

    return run


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of a device's multiprocessors, constant, so that sums keep their order."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def geometry(x: Tensor, as_one_sample: bool) -> Geometry:
    """Return the kernels' view of a result of `dense` (N, C, ...).

    `as_one_sample` allows the pixels of all samples to be treated as those of one.
    """
    n, c = x.shape[:2]
    p = x.numel() // (n * c)
    if p > 1 and memory_format(x) is torch.contiguous_format:
        return Geometry(n, p, c, (c * p, 1, p), x.itemsize)
    if as_one_sample:
        return Geometry(1, n * p, c, (0, c, 1), x.itemsize)
    return Geometry(n, p, c, (p * c, c, 1), x.itemsize)


def halved(x: Tensor, times: int = 1) -> Geometry:
    """Return the view that a dense `x`, with separate samples, has after `times` blurs."""
    shape = geometry(x, as_one_sample=False)
    size = x.shape
    for _ in range(times):
        size = blurred(size)
    p = math.prod(size)
    along_p = shape.strides[1] == 1
    return shape._replace(
        p=p, strides=(shape.c * p, 1, p) if along_p else (shape.c * p, shape.c, 1)
    )


def power(value: int, most: int) -> int:
    """Return the least power of two that is at least `value`, but at most `most`."""
    return min(1 << max(value - 1, 0).bit_length(), most)


def tile(shape: Geometry, blur: bool = False, maps: int = 1) -> tuple[int, int]:
    """Return pixels and channels of a tile, which is longest along contiguous memory."""
    values = TILE if maps == 1 else TILE // 2
    if blur:
        alone = shape.strides[2] > 1 or shape.c % 2 > 0
        values = BLUR_TILE // 4 if alone else BLUR_TILE * 2 // shape.itemsize
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
    """Divide the pixels of each sample into chunks, one for each program.

    `places` programs run at once. A kernel that `writes` a map has at most `MOST_TILES` in a chunk.
    A reduction of `maps` leaves partial sums, so its chunks are as long as `places` allow. `blur`
    is for kernels with the blur's index arithmetic. `source` is the tensor that is read, if it is
    another. If one pixel is written, its channels are neighbours in memory, but those of `source`
    may not be.
    """
    bp, bc = tile(shape, blur, maps)
    columns = -(-shape.c // bc)
    tiles = _tiles_of_chunk(-(-shape.p // bp), shape.n * columns, places)
    # with shorter ones the partial sums would have more bytes than the maps
    tiles = min(tiles, MOST_TILES) if writes else max(tiles, TILE // (bp * bc))
    chunk = tiles * bp
    splits = -(-shape.p // chunk)
    widest = WIDEST_LOAD // shape.itemsize
    along_c = shape.strides[2] == (source or shape).strides[2] == 1
    # the blur's pixels are no neighbours in memory
    ap = 1 if along_c or blur else math.gcd(shape.p, widest)
    ac = math.gcd(shape.c, widest) if along_c else 1
    return Plan(shape.n * splits * columns, splits, chunk, bp, bc, ap, ac)


def _tiles_of_chunk(tiles: int, rows: int, places: int) -> int:
    """Return the number of a row's `tiles` that each program covers, for the shortest total time.

    Programs run in waves of `places`; each needs about a tile's time to begin and end.
    """
    chunks = (-(-tiles // max(waves * places // rows, 1)) for waves in range(1, 5))
    return min(chunks, key=lambda chunk: -(-rows * -(-tiles // chunk) // places) * (chunk + 1))


def blurred(size: tuple[int, ...] | torch.Size) -> tuple[int, int]:
    """Return height and width after the blur, from (..., H, W)."""
    return (size[-2] + 1) // 2, (size[-1] + 1) // 2
