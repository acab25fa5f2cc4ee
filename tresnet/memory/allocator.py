"""Simulation of PyTorch's CUDACachingAllocator for one device and stream, with default settings.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp`. A request is rounded up to 512 B. The
small pool serves requests up to 1 MiB from segments of 2 MiB. The large pool serves larger requests
from segments of 20 MiB. For a request of at least 10 MiB, a new segment has the request's size,
rounded up to a multiple of 2 MiB. A request gets the smallest free block that is large enough.
Among free blocks of equal size, the block at the lowest address is chosen. A block is split if the
remainder is at least 512 B (small pool) or more than 1 MiB (large pool). Neighbouring free blocks
merge. On a full device, the allocator frees its unused segments and tries again. Expandable
segments, rounding to powers of two, garbage collection and `max_split_size_mb` are off by default,
and not simulated.
"""

import bisect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

from tresnet.memory.device import MIB, mib

# C++ calls these six constants kMinBlockSize, kSmallSize, kSmallBuffer, kLargeBuffer,
# kMinLargeAlloc and kRoundLarge.
MIN_BLOCK_BYTES = 512
SMALL_REQUEST_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_FROM_BYTES = 10 * MIB
SEGMENT_ROUNDING_BYTES = 2 * MIB

# Gap between the addresses of segments, so that blocks of two segments never merge.
_SEGMENT_GAP_BYTES = MIB


class SimulatedOutOfMemoryError(Exception):
    """Error of a request that does not fit, even after the cache was emptied."""

    def __init__(self, requested_bytes: int, free_bytes: int) -> None:
        super().__init__(f"{mib(requested_bytes)} requested, {mib(free_bytes)} free")
        self.requested_bytes = requested_bytes
        self.free_bytes = free_bytes


def round_request(n_bytes: int) -> int:
    """Return the block size for a request: `n_bytes` rounded up to a multiple of 512 B."""
    return -(-n_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """Block of memory in a segment of the allocator; `segment` is the segment's address."""

    address: int
    n_bytes: int
    small: bool
    segment: int
    free: bool = False

    @property
    def end(self) -> int:
        return self.address + self.n_bytes


class CachingAllocator:
    """Simulated CUDA caching allocator, which counts allocated and reserved bytes.

    `capacity_bytes` limits the sum of all segments. For every new or freed segment, `on_segment` is
    called with `segment_alloc` or `segment_free`, the segment's address and the segment's bytes.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        on_segment: Callable[[str, int, int], None] = lambda action, address, n_bytes: None,
    ) -> None:
        self._capacity_bytes = math.inf if capacity_bytes is None else capacity_bytes
        self._on_segment = on_segment
        self.allocated_bytes = self.reserved_bytes = 0
        self._segments: dict[int, int] = {}  # each segment's bytes, by the segment's address
        self._next_address = 0
        self._by_address: dict[int, MemoryBlock] = {}
        self._by_end: dict[int, MemoryBlock] = {}
        # Free blocks of the large and of the small pool, each a sorted list of (bytes, address).
        self._free: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])

    def malloc(self, n_bytes: int) -> MemoryBlock | None:
        """Allocate a block (None for zero bytes), or raise SimulatedOutOfMemoryError."""
        if n_bytes == 0:
            return None
        wanted = round_request(n_bytes)
        small = wanted <= SMALL_REQUEST_BYTES
        pool = self._free[small]
        best = bisect.bisect_left(pool, (wanted, -1))  # smallest sufficient block, lowest address
        if best < len(pool):
            block = self._by_address[pool[best][1]]
            self._remove(block)
        else:
            block = self._new_segment(wanted, small)
        rest = block.n_bytes - wanted
        if rest >= MIN_BLOCK_BYTES if small else rest > SMALL_REQUEST_BYTES:
            self._insert(MemoryBlock(block.address + wanted, rest, small, block.segment, free=True))
            block.n_bytes = wanted
        block.free = False
        self._insert(block)
        self.allocated_bytes += block.n_bytes
        return block

    def free(self, block: MemoryBlock | None) -> None:
        """Merge a block with its free neighbours, and return the merged block to its pool."""
        if block is None:
            return
        self.allocated_bytes -= block.n_bytes
        before, after = self._by_end.get(block.address), self._by_address.get(block.end)
        self._remove(block)
        for neighbour in (before, after):
            if neighbour is not None and neighbour.free:
                self._remove(neighbour)
                block.address = min(block.address, neighbour.address)
                block.n_bytes += neighbour.n_bytes
        block.free = True
        self._insert(block)

    def empty_cache(self) -> None:
        """Return to the device every segment in which no block is allocated."""
        for address, n_bytes in list(self._segments.items()):
            block = self._by_address[address]
            if block.free and block.n_bytes == n_bytes:
                self._remove(block)
                del self._segments[address]
                self.reserved_bytes -= n_bytes
                self._on_segment("segment_free", address, n_bytes)

    def segments(self) -> Iterator[list[MemoryBlock]]:
        """Yield the blocks of each segment in address order."""
        blocks = sorted(self._by_address.values(), key=lambda block: block.address)
        for _, run in groupby(blocks, key=lambda block: block.segment):
            yield list(run)

    def _insert(self, block: MemoryBlock) -> None:
        self._by_address[block.address] = self._by_end[block.end] = block
        if block.free:
            bisect.insort(self._free[block.small], (block.n_bytes, block.address))

    def _remove(self, block: MemoryBlock) -> None:
        del self._by_address[block.address], self._by_end[block.end]
        if block.free:
            pool = self._free[block.small]
            del pool[bisect.bisect_left(pool, (block.n_bytes, block.address))]

    def _new_segment(self, wanted: int, small: bool) -> MemoryBlock:
        n_bytes = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        if wanted >= OWN_SEGMENT_FROM_BYTES:
            n_bytes = -(-wanted // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES
        if n_bytes > self._capacity_bytes - self.reserved_bytes:
            self.empty_cache()
        room_bytes = self._capacity_bytes - self.reserved_bytes
        if n_bytes > room_bytes:
            raise SimulatedOutOfMemoryError(wanted, int(room_bytes))
        address = self._next_address
        self._segments[address] = n_bytes
        self._next_address += n_bytes + _SEGMENT_GAP_BYTES
        self.reserved_bytes += n_bytes
        self._on_segment("segment_alloc", address, n_bytes)
        return MemoryBlock(address, n_bytes, small, address)
