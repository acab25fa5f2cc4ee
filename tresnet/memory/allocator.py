"""A simulation of CUDACachingAllocator: one device, one stream, its default settings.

Written from the rules of `c10/cuda/CUDACachingAllocator.cpp`: a request is rounded up to 512 B;
requests up to 1 MiB are served by the small pool from segments of 2 MiB, larger ones by the large
pool from segments of 20 MiB or, from 10 MiB on, of their own size rounded up to 2 MiB. The
smallest free block that is large enough serves a request, lowest address first. A block is split
if the remainder is at least 512 B (small pool) or more than 1 MiB (large pool); free neighbours
merge. When the device is full, segments that are wholly free go back to it and the request is
tried once more. Expandable segments, `max_split_size_mb`, rounding to powers of two and garbage
collection are off, as they are by default.
"""

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tresnet.memory.device import MIB, mib

MIN_BLOCK_BYTES = 512
SMALL_REQUEST_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_FROM_BYTES = 10 * MIB
SEGMENT_ROUNDING_BYTES = 2 * MIB

# Segments lie this far apart, so that no two are ever neighbours.
_SEGMENT_GAP_BYTES = MIB


class SimulatedOutOfMemoryError(Exception):
    """The simulated device has no room for a request, even after its cache was emptied."""

    def __init__(self, requested_bytes: int, free_bytes: int) -> None:
        super().__init__(f"{mib(requested_bytes)} requested, {mib(free_bytes)} free")
        self.requested_bytes = requested_bytes
        self.free_bytes = free_bytes


def round_request(n_bytes: int) -> int:
    """The block size that serves a request: the next multiple of 512 B."""
    return -(-n_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def segment_bytes(block_bytes: int) -> int:
    """What is asked of the device when no free block can serve `block_bytes`."""
    if block_bytes <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < OWN_SEGMENT_FROM_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-block_bytes // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment; `before` and `after` are its neighbours there."""

    address: int
    n_bytes: int
    small: bool
    free: bool = True
    before: "Block | None" = None
    after: "Block | None" = None

    @property
    def whole_segment(self) -> bool:
        """Whether the block is all of its segment."""
        return self.before is None and self.after is None


@dataclass(slots=True)
class _FreeList:
    """Free blocks of one pool, ordered by size and then by address."""

    keys: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[tuple[int, int], Block] = field(default_factory=dict)

    def add(self, block: Block) -> None:
        key = (block.n_bytes, block.address)
        bisect.insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        key = (block.n_bytes, block.address)
        del self.keys[bisect.bisect_left(self.keys, key)]
        del self.blocks[key]

    def take_best(self, n_bytes: int) -> Block | None:
        index = bisect.bisect_left(self.keys, (n_bytes, -1))
        if index == len(self.keys):
            return None
        return self.blocks.pop(self.keys.pop(index))


class CachingAllocator:
    """Serves `malloc` and `free` as the CUDA caching allocator would, and keeps its statistics.

    Args:
        capacity_bytes: what the device has for segments; None for no limit.
        on_segment: called with `segment_alloc` or `segment_free`, the address and the bytes.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        on_segment: Callable[[str, int, int], None] = lambda action, address, n_bytes: None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._on_segment = on_segment
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.flushes = 0
        self._free = {True: _FreeList(), False: _FreeList()}
        self._next_address = 0
        self._segments: dict[int, Block] = {}

    def malloc(self, n_bytes: int) -> Block | None:
        """A block for `n_bytes`; None for zero bytes, which take no memory.

        Raises:
            SimulatedOutOfMemoryError: the device is full, also after `empty_cache`.
        """
        if n_bytes == 0:
            return None
        wanted = round_request(n_bytes)
        small = wanted <= SMALL_REQUEST_BYTES
        block = self._free[small].take_best(wanted) or self._new_segment(wanted, small)
        block.free = False
        self._split(block, wanted)
        self.allocated_bytes += block.n_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block | None) -> None:
        """Give a block back to its pool and merge it with free neighbours.

        Raises:
            ValueError: the block is free already.
        """
        if block is None:
            return
        if block.free:
            raise ValueError(f"the block at {block.address} was freed twice")
        self.allocated_bytes -= block.n_bytes
        pool = self._free[block.small]
        if block.before is not None and block.before.free:
            pool.remove(block.before)
            self._absorb_before(block)
        if block.after is not None and block.after.free:
            pool.remove(block.after)
            block.n_bytes += block.after.n_bytes
            block.after = block.after.after
            if block.after is not None:
                block.after.before = block
        block.free = True
        pool.add(block)

    def empty_cache(self) -> None:
        """Give every wholly free segment back to the device."""
        for pool in self._free.values():
            for block in [b for b in pool.blocks.values() if b.whole_segment]:
                pool.remove(block)
                del self._segments[block.address]
                self.reserved_bytes -= block.n_bytes
                self._on_segment("segment_free", block.address, block.n_bytes)

    def reset_peaks(self) -> None:
        """Start both peaks again from what is held now."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def segments(self) -> Iterator[list[Block]]:
        """The blocks of each segment in address order."""
        for block in self._segments.values():
            blocks, at = [], block
            while at is not None:
                blocks.append(at)
                at = at.after
            yield blocks

    def _absorb_before(self, block: Block) -> None:
        gone = block.before
        assert gone is not None
        if gone.before is None:
            self._segments[gone.address] = block
        block.address = gone.address
        block.n_bytes += gone.n_bytes
        block.before = gone.before
        if block.before is not None:
            block.before.after = block

    def _new_segment(self, wanted: int, small: bool) -> Block:
        n_bytes = segment_bytes(wanted)
        if not self._has_room(n_bytes):
            self.flushes += 1
            self.empty_cache()
            if not self._has_room(n_bytes):
                assert self.capacity_bytes is not None
                raise SimulatedOutOfMemoryError(wanted, self.capacity_bytes - self.reserved_bytes)
        block = Block(self._next_address, n_bytes, small)
        self._segments[block.address] = block
        self._next_address += n_bytes + _SEGMENT_GAP_BYTES
        self.reserved_bytes += n_bytes
        self._on_segment("segment_alloc", block.address, n_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return block

    def _has_room(self, n_bytes: int) -> bool:
        return self.capacity_bytes is None or self.reserved_bytes + n_bytes <= self.capacity_bytes

    def _split(self, block: Block, wanted: int) -> None:
        rest = block.n_bytes - wanted
        worth_it = rest >= MIN_BLOCK_BYTES if block.small else rest > SMALL_REQUEST_BYTES
        if not worth_it:
            return
        remainder = Block(
            block.address + wanted, rest, block.small, before=block, after=block.after
        )
        if block.after is not None:
            block.after.before = remainder
        block.after = remainder
        block.n_bytes = wanted
        self._free[block.small].add(remainder)
