"""Runs a trace through the allocator: what is allocated and reserved after every event."""

from collections import Counter
from dataclasses import dataclass

from tresnet.memory.allocator import (
    Block,
    CachingAllocator,
    SimulatedOutOfMemoryError,
    round_request,
)
from tresnet.memory.events import Category, Trace


@dataclass(frozen=True)
class Replay:
    """A trace on one device.

    `allocated_bytes[i]` and `reserved_bytes[i]` hold after event i. `peak_event` is the event
    that reached the peak of allocated, `out_of_memory_event` the one that did not fit, or None.
    `high_bytes` bounds allocated with every kernel's workspace at its highest.
    """

    allocated_bytes: list[int]
    reserved_bytes: list[int]
    peak_event: int
    high_bytes: int
    flushes: int
    out_of_memory_event: int | None

    @property
    def peak_allocated_bytes(self) -> int:
        """What `torch.cuda.max_memory_allocated` would say."""
        return self.allocated_bytes[self.peak_event] if self.allocated_bytes else 0

    @property
    def peak_reserved_bytes(self) -> int:
        """What `torch.cuda.max_memory_reserved` would say."""
        return max(self.reserved_bytes, default=0)


def replay(
    trace: Trace, capacity_bytes: int | None = None, *, highest_workspaces: bool = False
) -> Replay:
    """Serve every birth and death of `trace`; stops at the first that does not fit.

    Args:
        trace: the recorded run.
        capacity_bytes: what the device has for the allocator; None for no limit.
        highest_workspaces: also serve each operation's highest workspace.
    """
    allocator = CachingAllocator(capacity_bytes)
    blocks: dict[int, Block | None] = {}
    allocated: list[int] = []
    reserved: list[int] = []
    peak_event = high = 0
    out_of_memory: int | None = None
    for index, event in enumerate(trace.events):
        try:
            if event.alive:
                blocks[event.buffer] = allocator.malloc(trace.buffers[event.buffer].n_bytes)
            else:
                allocator.free(blocks.pop(event.buffer))
            borrowed = trace.operations[event.op].workspace_high_bytes if event.alive else 0
            if borrowed and highest_workspaces:
                allocator.free(allocator.malloc(borrowed))
        except SimulatedOutOfMemoryError:
            out_of_memory = index
            break
        allocated.append(allocator.allocated_bytes)
        reserved.append(allocator.reserved_bytes)
        if allocated[-1] > allocated[peak_event]:
            peak_event = index
        high = max(high, allocated[-1] + round_request(borrowed))
    return Replay(allocated, reserved, peak_event, high, allocator.flushes, out_of_memory)


def held_at_peak_bytes(trace: Trace) -> int:
    """The most that requests, rounded to 512 B, ever hold: no allocator needs less."""
    held = most = 0
    for event in trace.events:
        n_bytes = round_request(trace.buffers[event.buffer].n_bytes)
        held += n_bytes if event.alive else -n_bytes
        most = max(most, held)
    return most


def live_buffers(trace: Trace, event: int) -> list[int]:
    """The buffers alive after `event`."""
    live: dict[int, None] = {}
    for step in trace.events[: event + 1]:
        if step.alive:
            live[step.buffer] = None
        else:
            live.pop(step.buffer, None)
    return list(live)


def breakdown(trace: Trace, replayed: Replay) -> dict[Category, int]:
    """Bytes by category at the peak, largest first; they sum to the peak of allocated."""
    return _sorted(_live_bytes(trace, replayed, by_module=False))


def activations_by_module(trace: Trace, replayed: Replay) -> dict[str, int]:
    """Bytes of activations and their gradients alive at the peak, by the module they came from."""
    return _sorted(_live_bytes(trace, replayed, by_module=True))


def _live_bytes(trace: Trace, replayed: Replay, *, by_module: bool) -> Counter:
    sizes: Counter = Counter()
    live = [trace.buffers[i] for i in live_buffers(trace, replayed.peak_event)]
    for buffer in live:
        if not by_module:
            sizes[buffer.category] += buffer.n_bytes
        elif buffer.category in (Category.ACTIVATIONS, Category.ACTIVATION_GRADIENTS):
            sizes[buffer.module] += buffer.n_bytes
    if not by_module:
        rounding = replayed.peak_allocated_bytes - sum(b.n_bytes for b in live)
        sizes[Category.ROUNDING] = rounding
    return sizes


def _sorted(sizes: Counter) -> dict:
    return {name: n for name, n in sizes.most_common() if n}
