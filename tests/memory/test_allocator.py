"""The allocator's rules at their edges, and what must hold for any sequence of requests."""

import itertools
import random

import pytest

from tresnet.memory.allocator import (
    CachingAllocator,
    SimulatedOutOfMemoryError,
    round_request,
    segment_bytes,
)
from tresnet.memory.device import MIB

KIB = 2**10


@pytest.mark.parametrize(
    ("requested", "block"), [(1, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512)]
)
def test_requests_are_rounded_to_512_bytes(requested, block):
    assert round_request(requested) == block
    allocator = CachingAllocator()
    allocator.malloc(requested)
    assert allocator.allocated_bytes == block


@pytest.mark.parametrize(
    ("block", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (75 * MIB, 76 * MIB),
    ],
)
def test_segments_follow_the_pools(block, segment):
    assert segment_bytes(block) == segment
    allocator = CachingAllocator()
    allocator.malloc(block)
    assert allocator.reserved_bytes == segment


def test_large_block_is_not_split_for_a_remainder_of_one_mib():
    """An input of 73.5 MiB in a fresh segment of 74 MiB counts as 74 MiB."""
    allocator = CachingAllocator()
    allocator.malloc(int(73.5 * MIB))
    assert allocator.allocated_bytes == 74 * MIB
    allocator.malloc(11 * MIB)
    assert allocator.allocated_bytes == 74 * MIB + 12 * MIB


def test_large_block_is_split_for_a_remainder_above_one_mib():
    allocator = CachingAllocator()
    held = allocator.malloc(2 * MIB)
    assert allocator.allocated_bytes == 2 * MIB
    assert allocator.reserved_bytes == 20 * MIB
    other = allocator.malloc(17 * MIB - 512)
    assert allocator.reserved_bytes == 20 * MIB
    assert other.address == held.address + held.n_bytes
    assert other.n_bytes == 17 * MIB - 512
    allocator.free(other)
    assert allocator.malloc(17 * MIB).n_bytes == 18 * MIB


def test_smallest_free_block_that_fits_serves_a_request():
    allocator = CachingAllocator()
    large, small = allocator.malloc(40 * MIB), allocator.malloc(30 * MIB)
    wanted = small.address
    allocator.free(large)
    allocator.free(small)
    assert allocator.malloc(29 * MIB).address == wanted


def test_free_neighbours_merge():
    allocator = CachingAllocator()
    blocks = [allocator.malloc(256 * KIB) for _ in range(8)]
    assert allocator.reserved_bytes == 2 * MIB
    for index in (1, 3, 2, 0, 5, 7, 6, 4):
        allocator.free(blocks[index])
    ((block,),) = allocator.segments()
    assert block.free
    assert block.n_bytes == 2 * MIB


def test_pools_are_separate():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(20 * MIB))
    allocator.malloc(512)
    assert allocator.reserved_bytes == 22 * MIB


def test_freeing_twice_is_refused():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(0))  # None, which takes nothing
    assert allocator.reserved_bytes == 0
    block = allocator.malloc(512)
    allocator.free(block)
    with pytest.raises(ValueError, match="freed twice"):
        allocator.free(block)


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


def test_empty_cache_keeps_segments_in_use():
    allocator = CachingAllocator()
    first, second = allocator.malloc(MIB), allocator.malloc(512)
    allocator.free(first)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 2 * MIB
    allocator.free(second)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert list(allocator.segments()) == []


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
