"""The allocator's rules at their edges, and what must hold for any sequence of requests."""

import itertools
import random

import pytest

from tresnet.memory.allocator import CachingAllocator, SimulatedOutOfMemoryError
from tresnet.memory.device import MIB


@pytest.mark.parametrize(
    ("requested", "block", "segment"),
    [
        (0, 0, 0),
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 512, 10 * MIB + 512, 12 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # not split for a rest of one MiB or less
    ],
)
def test_requests_are_rounded_and_segments_follow_the_pools(requested, block, segment):
    allocator = CachingAllocator()
    held = allocator.malloc(requested)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (block, segment)
    allocator.free(held)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, segment)


def test_large_block_is_split_for_a_remainder_above_one_mib():
    allocator = CachingAllocator()
    held = allocator.malloc(2 * MIB)
    other = allocator.malloc(17 * MIB - 512)
    assert allocator.reserved_bytes == 20 * MIB
    assert (other.address, other.n_bytes) == (held.address + held.n_bytes, 17 * MIB - 512)
    allocator.free(other)
    assert allocator.malloc(17 * MIB).n_bytes == 18 * MIB


def test_smallest_free_block_of_the_pool_serves_a_request():
    allocator = CachingAllocator()
    large, small = allocator.malloc(40 * MIB), allocator.malloc(30 * MIB)
    wanted = small.address
    allocator.free(large)
    allocator.free(small)
    assert allocator.malloc(29 * MIB).address == wanted
    allocator.malloc(512)  # from the other pool
    assert allocator.reserved_bytes == 72 * MIB


def test_full_device_flushes_its_cache_and_retries():
    actions = []
    allocator = CachingAllocator(100 * MIB, on_segment=lambda *action: actions.append(action))
    allocator.free(allocator.malloc(60 * MIB))
    assert [action for action, *_ in actions] == ["segment_alloc"]
    allocator.malloc(70 * MIB)
    assert [action for action, *_ in actions[1:]] == ["segment_free", "segment_alloc"]
    assert allocator.reserved_bytes == 70 * MIB
    with pytest.raises(SimulatedOutOfMemoryError, match=r"50\.0 MiB requested, 30\.0 MiB free"):
        allocator.malloc(50 * MIB)


@pytest.mark.parametrize("seed", range(8))
def test_blocks_never_overlap_and_bytes_are_conserved(seed):
    generator = random.Random(seed)
    allocator = CachingAllocator()
    held = {}
    for turn in range(600):
        if held and generator.random() < 0.45:
            allocator.free(held.pop(generator.choice(list(held))))
        else:
            size = int(2 ** generator.uniform(0, 25))
            block = allocator.malloc(size)
            assert block.n_bytes >= size
            held[turn] = block
        if generator.random() < 0.01:
            allocator.empty_cache()
            assert all(any(not b.free for b in segment) for segment in allocator.segments())
        check(allocator, list(held.values()))


def check(allocator, held):
    spans = sorted((b.address, b.address + b.n_bytes) for b in held)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert allocator.allocated_bytes == sum(b.n_bytes for b in held)
    segments = list(allocator.segments())
    assert allocator.reserved_bytes == sum(b.n_bytes for s in segments for b in s)
    used = [b for s in segments for b in s if not b.free]
    assert {id(b) for b in used} == {id(b) for b in held}
    for segment in segments:
        assert all(a.address + a.n_bytes == b.address for a, b in itertools.pairwise(segment))
        assert not any(a.free and b.free for a, b in itertools.pairwise(segment))
