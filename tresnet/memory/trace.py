"""Trace of a model's steps, which does not depend on the GPU's capacity."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Category(StrEnum):
    """Purpose of a buffer; every byte at the peak belongs to one category."""

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
    """Part of a step, or the set-up before the steps; every operation belongs to one phase."""

    SETUP = "setup"
    INPUT = "input"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(slots=True)
class Operation:
    """Traced operation, whose real workspace can be `workspace_high_bytes` larger than traced."""

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
    """Storage on the device; `op` is the index in `Trace.operations` of the creating operation."""

    n_bytes: int
    category: Category
    module: str
    op: int


class Event(NamedTuple):
    """Allocation or free of `Trace.buffers[buffer]` during the operation `Trace.operations[op]`."""

    buffer: int
    allocates: bool
    op: int


@dataclass(slots=True)
class Trace:
    """Record of a model's steps: buffers, operations, and events in the order of time."""

    buffers: list[Buffer] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def allocate(self, n_bytes: int, category: Category, module: str) -> int:
        """Record a new buffer and return its index."""
        op = len(self.operations) - 1
        self.buffers.append(Buffer(n_bytes, category, module, op))
        self.events.append(Event(len(self.buffers) - 1, True, op))
        return len(self.buffers) - 1

    def free(self, buffer: int) -> None:
        self.events.append(Event(buffer, False, len(self.operations) - 1))
