"""Division of a batch of feature maps into the programs and tiles of Triton kernels.

All maps are channels_last: the value of sample n, pixel p and channel c lies at the index
(n * P + p) * C + c, for P pixels and C channels. A tile has up to 16 values for each of 128
threads. A reduction has about one to four times as many programs as a GPU runs at once. Consecutive
programs cover neighbouring channels, because these channels may lie in the same 32-byte sector of
memory.
"""

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

SpecT = TypeVar("SpecT")
_specs: dict[Any, Any] = {}  # results of functions that are `cached_per_layout`

# Largest size of a tile, in values. A blur needs more registers, so its tiles have BLUR_TILE values
# in 16 bits, and half as many in float32. With an odd number of channels, a blur's threads load
# single values, and its tiles have a quarter of BLUR_TILE. Twice as many values would spill.
TILE, BLUR_TILE = 2048, 1024
WARPS = 4
CHANNELS = 64  # largest width of a tile; 64 channels in 16 bits take 128 bytes
# Each program of `apply` may merge the moments of a batch itself. It then reads 256 bytes for each
# chunk, so there must be few chunks: tiles are narrow, and chunks are large.
MERGED_CHANNELS = 32
# The kernels of SE add up the sums of all chunks of a sample, 8 at once. More chunks of a sample
# would save less time in the kernel that computes the sums.
MOST_SPLITS = 16
MOST_TILES = 4  # most tiles of a program that writes a map; one load of mean and scale serves all
WIDEST_LOAD = 16  # most bytes that a thread loads at once
MOST_SPECS = 8192  # a training step of tresnet_m needs about 100
MULTIPROCESSORS = 132  # an H100 has 132; without a GPU, this number is assumed


class Tiling(NamedTuple):
    """Division of a batch of maps among the programs of a kernel.

        pixels of sample 0          | pixels of sample 1          | ...
        chunk 0 | chunk 1 | chunk 2 | chunk 3 | chunk 4 | chunk 5 | ...    here `splits` is 3
        tile tile tile tile ...

    A program covers a chunk and BC channels, and loops over tiles of BP pixels.

    Attributes:
        programs: Number of programs.
        G: Number of chunks of all samples.
        P: Number of pixels of a sample. A batch may count as one sample.
        C: Number of channels.
        splits: Number of chunks of a sample.
        chunk: Number of pixels of a chunk; the last one of a sample may have fewer.
        BP: Number of pixels of a tile.
        BC: Number of channels of a tile.
        AC: Number of channels that a thread may load at once, because it divides C. Kernels get it,
            because Triton detects only divisibility by 16.
    """

    programs: int
    G: int
    P: int
    C: int
    splits: int
    chunk: int
    BP: int
    BC: int
    AC: int


def interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels, on a CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def dense(x: Tensor) -> Tensor:
    """Return a map in channels_last memory without gaps; copy only if needed."""
    return x.contiguous(memory_format=torch.channels_last)


def cached_per_layout(describe: Callable[..., SpecT]) -> Callable[..., SpecT]:
    """Cache the results of `describe(x, *rest)`, because a call takes longer than a launch.

    `describe` must read only the shape, strides, dtype and device of `x`.
    """

    @functools.wraps(describe)
    def run(x: Tensor, *rest: Any) -> SpecT:
        key = describe, x.shape, x.stride(), x.dtype, x.device, rest
        spec = _specs.get(key)
        if spec is None:
            if len(_specs) >= MOST_SPECS:
                _specs.clear()
            # Dispatch modes are disabled: a trace must not depend on whether the result was cached.
            with _disable_current_modes():
                spec = _specs[key] = describe(x, *rest)
        return spec

    return run


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return a GPU's number of multiprocessors; without a GPU, return `MULTIPROCESSORS`."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def power(value: int, most: int) -> int:
    """Return the least power of two that is at least `value`, but not more than `most`."""
    return min(1 << max(value - 1, 0).bit_length(), most)


def tile(
    pixels: int, channels: int, itemsize: int, blur: bool, maps: int, most: int = CHANNELS
) -> tuple[int, int]:
    """Return a tile's numbers of pixels and channels; the latter is at most `most`."""
    values = TILE if maps == 1 else TILE // 2
    if blur:
        values = BLUR_TILE // 4 if channels % 2 else BLUR_TILE * 2 // itemsize
    bc = power(channels, most)
    columns = -(-channels // bc)
    if bc > 32 and channels < 0.8 * columns * bc and -(-channels // 32) < 2 * columns:
        bc = 32  # in wider tiles, over a fifth of the threads would have no channel
    return power(pixels, max(values // bc, 1)), bc


def divide(
    x: Tensor,
    resident: int,
    *,
    per_sample: bool,
    halvings: int = 0,
    writes: bool = False,
    maps: int = 1,
    merges: bool = False,
) -> Tiling:
    """Divide a channels_last batch (N, C, H, W) among the programs of a kernel.

    A GPU runs `resident` programs at once. The chunk size minimises the estimated time. Without
    `per_sample`, the batch counts as one sample. With `halvings`, the kernel computes a blur or its
    transpose, and the pixels are those that so many blurs with stride 2 leave. If the kernel
    `writes` a map, a chunk has at most `MOST_TILES` tiles. Otherwise the kernel reduces `maps`
    tensors to partial sums, and a sample has at most `MOST_SPLITS` chunks. With `merges`, programs
    that write the map merge the sums. Chunks are then as large as the GPU's programs allow, and a
    reduction has half as many programs with twice as many warps.
    """
    assert x.is_contiguous(memory_format=torch.channels_last), x.stride()
    samples, channels, *size = x.shape
    for _ in range(halvings):
        size = blurred(size)
    pixels = math.prod(size)
    if not per_sample:
        samples, pixels = 1, samples * pixels
    widest = MERGED_CHANNELS if merges else CHANNELS
    bp, bc = tile(pixels, channels, x.itemsize, halvings > 0, maps, widest)
    if merges and not writes:
        bp, resident = 2 * bp, resident // 2
    columns = -(-channels // bc)
    whole = -(-pixels // bp)
    tiles = _tiles_of_chunk(whole, samples * columns, resident, 1 if merges else 4)
    if not writes:  # the partial sums of smaller chunks could take more bytes than the map
        tiles = max(tiles, TILE // (bp * bc))
    elif not merges:
        tiles = min(tiles, MOST_TILES)
    if per_sample and not writes:
        tiles = max(tiles, -(-whole // MOST_SPLITS))
    chunk = tiles * bp
    splits = -(-pixels // chunk)
    ac = math.gcd(channels, WIDEST_LOAD // x.itemsize)
    groups = samples * splits
    return Tiling(groups * columns, groups, pixels, channels, splits, chunk, bp, bc, ac)


def _tiles_of_chunk(tiles: int, lines: int, resident: int, most: int) -> int:
    """Return the number of tiles of a chunk for which the estimated time is least.

    There are `lines` rows of `tiles` tiles. Each row is divided into chunks; a program covers one.
    A GPU runs `resident` programs at once, up to `most` times. A program takes about one tile's
    time to begin and end.
    """
    chunks = (-(-tiles // max(waves * resident // lines, 1)) for waves in range(1, most + 1))
    return min(chunks, key=lambda chunk: -(-lines * -(-tiles // chunk) // resident) * (chunk + 1))


def blurred(size: Sequence[int]) -> tuple[int, int]:
    """Return height and width of a map of size (..., H, W) after a blur with stride 2."""
    return (size[-2] + 1) // 2, (size[-1] + 1) // 2
