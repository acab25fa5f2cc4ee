"""Export of a prediction in the format of `torch.cuda.memory._dump_snapshot`, for PyTorch's viewer.

The viewer is at pytorch.org/memory_viz. An allocation's stack frames name the operation and the
modules around this operation. A frame's file name is the phase, and its line number is the step.
"""

import pickle
from pathlib import Path
from typing import Any

from tresnet.memory.allocator import CachingAllocator, MemoryBlock, SimulatedOutOfMemoryError
from tresnet.memory.prediction import MemoryPrediction
from tresnet.memory.replay import free_bytes
from tresnet.memory.trace import Buffer, Event, Trace
from tresnet.writing import atomic_write


def write_snapshot(prediction: MemoryPrediction, path: str | Path) -> Path:
    """Write the allocations and frees of the traced steps; a failed write raises WriteError."""
    path, content = Path(path), snapshot(prediction)
    with atomic_write(path) as temporary:
        temporary.write_bytes(pickle.dumps(content))
    return path


def snapshot(prediction: MemoryPrediction) -> dict[str, Any]:
    """Return what `torch.cuda.memory._snapshot()` would return after the traced steps."""
    trace = prediction.trace
    recording = _Recording(trace, free_bytes(prediction.device))
    for event in trace.events:
        try:
            recording.replay(event)
        except SimulatedOutOfMemoryError as error:
            recording.add("oom", 0, error.requested_bytes, device_free=error.free_bytes)
            break
    return {
        "segments": recording.segments(),
        "device_traces": [recording.entries],
        "allocator_settings": {},
    }


class _Recording:
    def __init__(self, trace: Trace, capacity_bytes: int | None) -> None:
        self.entries: list[dict[str, Any]] = []
        self._trace = trace
        self._frames: list[dict[str, Any]] = []
        self._allocator = CachingAllocator(capacity_bytes, on_segment=self.add)
        self._blocks: dict[int, MemoryBlock | None] = {}
        self._buffer_at: dict[int, Buffer] = {}

    def replay(self, event: Event) -> None:
        buffer = self._trace.buffers[event.buffer]
        self._frames = self._frames_of(buffer)
        if event.allocates:
            block = self._blocks[event.buffer] = self._allocator.malloc(buffer.n_bytes)
            if block is not None:
                self._buffer_at[block.address] = buffer
                self.add("alloc", block.address, buffer.n_bytes, category=buffer.category.value)
            return
        block = self._blocks.pop(event.buffer)
        if block is not None:
            del self._buffer_at[block.address]
            for action in ("free_requested", "free_completed"):
                self.add(action, block.address, buffer.n_bytes)
            self._allocator.free(block)

    def add(self, action: str, address: int, n_bytes: int, **more: Any) -> None:
        entry = {"action": action, "addr": address, "size": n_bytes, "stream": 0}
        now = len(self.entries)  # the viewer needs the order of events, not their times
        self.entries.append({**entry, "time_us": now, "frames": self._frames, **more})

    def segments(self) -> list[dict[str, Any]]:
        return [self._describe(blocks) for blocks in self._allocator.segments()]

    def _describe(self, blocks: list[MemoryBlock]) -> dict[str, Any]:
        allocated = sum(b.n_bytes for b in blocks if not b.free)
        return {
            "device": 0,
            "address": blocks[0].address,
            "total_size": sum(b.n_bytes for b in blocks),
            "allocated_size": allocated,
            "active_size": allocated,
            "stream": 0,
            "segment_type": "small" if blocks[0].small else "large",
            "segment_pool_id": (0, 0),
            "blocks": [self._describe_block(b) for b in blocks],
        }

    def _describe_block(self, block: MemoryBlock) -> dict[str, Any]:
        described: dict[str, Any] = {"address": block.address, "size": block.n_bytes}
        if block.free:
            return {**described, "requested_size": 0, "state": "inactive", "frames": []}
        buffer = self._buffer_at[block.address]
        described |= {"requested_size": buffer.n_bytes, "state": "active_allocated"}
        return {**described, "frames": self._frames_of(buffer), "category": buffer.category.value}

    def _frames_of(self, buffer: Buffer) -> list[dict[str, Any]]:
        operation = self._trace.operations[buffer.op]
        parts = buffer.module.split(".") if buffer.module else []
        modules = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        place = {"filename": operation.phase.value, "line": operation.step}
        return [{**place, "name": name} for name in (operation.name, *modules)]
