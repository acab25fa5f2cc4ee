"""Replay of a trace of allocations and frees on the simulated allocator."""

from collections import Counter
from itertools import accumulate
from typing import NamedTuple

from tresnet.memory.allocator import (
    SMALL_SEGMENT_BYTES,
    CachingAllocator,
    MemoryBlock,
    SimulatedOutOfMemoryError,
    round_request,
)
from tresnet.memory.device import Device
from tresnet.memory.trace import Category, Trace


class Replay(NamedTuple):
    """Memory of one trace on one device.

    `allocated_bytes[i]` and `reserved_bytes[i]` are the bytes after event i of the trace. Allocated
    bytes peak at event `peak_event`. `out_of_memory_event` is the event that did not fit, or None.
    `high_bytes` is the peak of allocated bytes if every kernel takes its largest workspace.
    """

    allocated_bytes: list[int]
    reserved_bytes: list[int]
    peak_event: int
    high_bytes: int
    out_of_memory_event: int | None

    @property
    def peak_allocated_bytes(self) -> int:
        """Predicted `torch.cuda.max_memory_allocated`."""
        return self.allocated_bytes[self.peak_event] if self.allocated_bytes else 0

    @property
    def peak_reserved_bytes(self) -> int:
        """Predicted `torch.cuda.max_memory_reserved`."""
        return max(self.reserved_bytes, default=0)


def free_bytes(device: Device) -> int | None:
    """Return the device's memory minus its CUDA context; None if the memory has no limit."""
    if device.capacity_bytes is None:
        return None
    return max(device.capacity_bytes - device.context_bytes, SMALL_SEGMENT_BYTES)


def replay(
    trace: Trace, capacity_bytes: int | None = None, *, highest_workspaces: bool = False
) -> Replay:
    """Allocate and free the buffers of `trace` in order; stop at the first that does not fit.

    `capacity_bytes` limits the allocator; None means no limit. With `highest_workspaces`, every
    workspace has its largest possible size.
    """
    allocator = CachingAllocator(capacity_bytes)
    blocks: dict[int, MemoryBlock | None] = {}
    allocated: list[int] = []
    reserved: list[int] = []
    peak_event = high = 0
    out_of_memory: int | None = None
    for index, event in enumerate(trace.events):
        try:
            if event.allocates:
                blocks[event.buffer] = allocator.malloc(trace.buffers[event.buffer].n_bytes)
            else:
                allocator.free(blocks.pop(event.buffer))
            operation = trace.operations[event.op]
            workspace_bytes = operation.workspace_high_bytes if event.allocates else 0
            if workspace_bytes and highest_workspaces:  # a kernel frees its workspace at its end
                allocator.free(allocator.malloc(workspace_bytes))
        except SimulatedOutOfMemoryError:
            out_of_memory = index
            break
        allocated.append(allocator.allocated_bytes)
        reserved.append(allocator.reserved_bytes)
        if allocated[-1] > allocated[peak_event]:
            peak_event = index
        high = max(high, allocated[-1] + round_request(workspace_bytes))
    return Replay(allocated, reserved, peak_event, high, out_of_memory)


def peak_live_bytes(trace: Trace) -> int:
    """Return the peak of the total bytes of live buffers, each rounded up to 512 B."""
    sizes = (
        round_request(trace.buffers[event.buffer].n_bytes) * (1 if event.allocates else -1)
        for event in trace.events
    )
    return max(accumulate(sizes), default=0)


def breakdown(trace: Trace, replayed: Replay) -> dict[Category, int]:
    """Return bytes by category at the peak, largest first; their sum is `peak_allocated_bytes`."""
    sizes: Counter = Counter()
    for event in trace.events[: replayed.peak_event + 1]:
        buffer = trace.buffers[event.buffer]
        sizes[buffer.category] += buffer.n_bytes if event.allocates else -buffer.n_bytes
    sizes[Category.ROUNDING] = replayed.peak_allocated_bytes - sum(sizes.values())
    return {category: n_bytes for category, n_bytes in sizes.most_common() if n_bytes}
