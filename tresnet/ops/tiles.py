"""How the Triton kernels see a batch of feature maps, and how their work is cut.

A batch is (n, p, c): sample, pixel, channel, with one stride each, so that one kernel reads
channels_last and contiguous memory along its contiguous direction. Tiles give each of 128 threads 16
values, 8 where there is a blur; reductions are cut into enough programs to fill the multiprocessors
of a large GPU several times over.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

TILE, BLUR_TILE = 2048, 1024  # the blur's index arithmetic would spill at 2048
WARPS = 4
PROGRAMS = 1024
MOST_TILES = 4  # of one program that writes: enough to share the loads of the channels' factors


class Geometry(NamedTuple):
    """A tensor as (samples, pixels, channels) with a stride each, in elements."""

    n: int
    p: int
    c: int
    strides: tuple[int, int, int]


class Plan(NamedTuple):
    """How a reduction is cut: chunks of `chunk` pixels, `splits` a sample; tiles of bp x bc."""

    splits: int
    chunk: int
    bp: int
    bc: int


def interpreted() -> bool:
    """Whether Triton was told to interpret its kernels, so that they run on a CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Make the device of `x` the current one: Triton launches on that, whatever its arguments."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def memory_format(x: Tensor) -> torch.memory_format:
    """The dense format `x` is in, or is nearest to."""
    if x.dim() == 4 and not x.is_contiguous() and x.stride(1) == 1:
        return torch.channels_last
    return torch.contiguous_format


def dense(x: Tensor, like: Tensor | None = None) -> Tensor:
    """`x` in the memory format of `like` (its own if None), copied only if it is in another."""
    return x.contiguous(memory_format=memory_format(x if like is None else like))


def geometry(x: Tensor, whole_batch: bool) -> Geometry:
    """How the kernels see a dense tensor (N, C, ...).

    Args:
        x: as `dense` returns it.
        whole_batch: the samples need not be told apart.
    """
    n, c = x.shape[:2]
    p = x.numel() // (n * c)
    if p > 1 and memory_format(x) is torch.contiguous_format:
        return Geometry(n, p, c, (c * p, 1, p))
    if whole_batch:
        return Geometry(1, n * p, c, (0, c, 1))
    return Geometry(n, p, c, (p * c, c, 1))


def _power(value: int, most: int) -> int:
    """The least power of two that is at least `value`, but at most `most`."""
    return min(1 << max(value - 1, 0).bit_length(), most)


def tile(shape: Geometry, blur: bool = False) -> tuple[int, int]:
    """Pixels and channels of a tile, longest along contiguous memory."""
    values = BLUR_TILE if blur else TILE
    if shape.strides[2] == 1:
        bc = _power(shape.c, 64)
        return _power(shape.p, values // bc), bc
    bp = _power(shape.p, values)
    return bp, _power(shape.c, values // bp)


def plan(shape: Geometry, blur: bool = False, most_tiles: int | None = None) -> Plan:
    """Cut the pixels of each sample into chunks, one a program.

    Args:
        shape: what is cut.
        blur: the kernel has the blur's index arithmetic.
        most_tiles: of a chunk; None for a reduction, whose chunks leave partial sums and are as
            long as `PROGRAMS` allows.
    """
    bp, bc = tile(shape, blur)
    columns = -(-shape.c // bc)
    wanted = max(-(-PROGRAMS // (shape.n * columns)), 1)
    tiles = -(-shape.p // (wanted * bp))
    chunk = min(tiles, most_tiles or tiles) * bp
    return Plan(-(-shape.p // chunk), chunk, bp, bc)


def blurred(size: tuple[int, ...] | torch.Size) -> tuple[int, int]:
    """Height and width after the blur, from (..., H, W)."""
    return (size[-2] + 1) // 2, (size[-1] + 1) // 2
