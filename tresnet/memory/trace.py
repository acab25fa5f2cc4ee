"""Memory events of a traced step: buffers, their births and deaths, and the operations around them.

A trace is independent of a device: `tresnet.memory.replay` runs one trace through allocators of any
capacity.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby


class Category(StrEnum):
    """Purpose of a buffer; every byte at the peak belongs to one of these."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    EMA = "ema weights"
    BUCKETS = "ddp buckets"
    INPUT = "input and target"
    CAST_WEIGHTS = "autocast weights"
    ACTIVATIONS = "activations"
    ACTIVATION_GRADIENTS = "activation gradients"
    TEMPORARY = "optimizer temporaries"
    WORKSPACE = "workspaces"
    ROUNDING = "rounding"


class Phase(StrEnum):
    """The part of the run to which an operation belongs."""

    SETUP = "setup"
    INPUT = "input"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(slots=True)
class Operation:
    """One dispatched operation; its workspace may exceed the expected by `workspace_high_bytes`."""

    name: str
    phase: Phase
    module: str
    step: int
    shapes: tuple[tuple[int, ...], ...] = ()
    workspace_high_bytes: int = 0

    def __str__(self) -> str:
        shapes = ", ".join("x".join(map(str, shape)) for shape in self.shapes if shape)
        where = f" in {self.module}" if self.module else ""
        return f"{self.phase} {self.name}{where}" + (f" -> {shapes}" if shapes else "")


@dataclass(slots=True)
class Buffer:
    """One storage on the device, with the operation and the module that created it."""

    n_bytes: int
    category: Category
    module: str
    op: int


@dataclass(slots=True, frozen=True)
class Event:
    """Birth (`alive`) or death of a buffer during operation `op`."""

    buffer: int
    alive: bool
    op: int


@dataclass(slots=True)
class Trace:
    """The recorded run; `step_starts` are the indices of the first event of each step."""

    buffers: list[Buffer] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    step_starts: list[int] = field(default_factory=list)

    def birth(self, n_bytes: int, category: Category, module: str) -> int:
        """Record a new buffer and return its index."""
        op = len(self.operations) - 1
        self.buffers.append(Buffer(n_bytes, category, module, op))
        self.events.append(Event(len(self.buffers) - 1, True, op))
        return len(self.buffers) - 1

    def death(self, buffer: int) -> None:
        """Record the end of a buffer."""
        self.events.append(Event(buffer, False, len(self.operations) - 1))

    def settled(self) -> "Trace":
        """Return a copy of the trace so far, with consecutive deaths sorted.

        Some come in a hash table's order (autocast's cache), on which no allocator's result
        depends.
        """
        events: list[Event] = []
        for _, run in groupby(self.events, key=lambda e: (e.alive, e.op)):
            # births keep their order, as sorting is stable
            events.extend(sorted(run, key=lambda e: 0 if e.alive else e.buffer))
        return Trace(list(self.buffers), list(self.operations), events, list(self.step_starts))
