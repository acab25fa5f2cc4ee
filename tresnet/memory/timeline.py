"""Memory over one step, operation by operation, as pictures and pages show it."""

from collections import defaultdict
from dataclasses import dataclass

from tresnet.memory.allocator import round_request
from tresnet.memory.events import Buffer, Category, Operation, Phase, Trace
from tresnet.memory.replay import live_buffers
from tresnet.memory.result import Prediction

# From what lasts longest to what comes and goes: the order of stacking.
STACK = tuple(Category)


@dataclass(frozen=True)
class Point:
    """The fullest moment of one operation. `by_category_bytes` follows `STACK`."""

    operation: Operation
    allocated_bytes: int
    reserved_bytes: int
    by_category_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Span:
    """Points `first` to `last` of one phase."""

    phase: Phase
    first: int
    last: int


@dataclass(frozen=True)
class ModuleRow:
    """What one module contributes: its parameters and gradients, and what was alive at the peak."""

    name: str
    parameter_bytes: int
    gradient_bytes: int
    activation_bytes: int
    activation_gradient_bytes: int
    operations: int

    @property
    def total_bytes(self) -> int:
        """All of the module's bytes."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.activation_bytes
            + self.activation_gradient_bytes
        )


def timeline(prediction: Prediction) -> list[Point]:
    """The points of the last step, in the order in which operations ran."""
    trace, replayed = prediction.trace, prediction.replay
    first = trace.step_starts[-1] if trace.step_starts else 0
    sizes: dict[Category, int] = defaultdict(int)
    points: dict[int, Point] = {}
    n_events = len(replayed.allocated_bytes)
    for index, event in enumerate(trace.events[:n_events]):
        buffer = trace.buffers[event.buffer]
        sizes[buffer.category] += buffer.n_bytes if event.alive else -buffer.n_bytes
        if index < first:
            continue
        allocated = replayed.allocated_bytes[index]
        known = points.get(event.op)
        if known is None or allocated > known.allocated_bytes:
            points[event.op] = Point(
                trace.operations[event.op],
                allocated,
                replayed.reserved_bytes[index],
                _stacked(sizes, allocated),
            )
    return [points[op] for op in sorted(points)]


def phases(points: list[Point]) -> list[Span]:
    """Runs of points of one phase."""
    spans: list[Span] = []
    for index, point in enumerate(points):
        phase = point.operation.phase
        if spans and spans[-1].phase is phase:
            spans[-1] = Span(phase, spans[-1].first, index)
        else:
            spans.append(Span(phase, index, index))
    return spans


def module_rows(prediction: Prediction) -> list[ModuleRow]:
    """One row for each module that made a buffer alive at the peak, largest first."""
    trace = prediction.trace
    cells: dict[str, dict[Category, int]] = defaultdict(lambda: defaultdict(int))
    for buffer in _alive_at_peak(trace, prediction.replay.peak_event):
        cells[buffer.module][buffer.category] += round_request(buffer.n_bytes)
    counts: dict[str, int] = defaultdict(int)
    for operation in trace.operations:
        if operation.step == len(trace.step_starts):
            counts[operation.module] += 1
    rows = [
        ModuleRow(
            name,
            sizes[Category.PARAMETERS],
            sizes[Category.GRADIENTS],
            sizes[Category.ACTIVATIONS],
            sizes[Category.ACTIVATION_GRADIENTS],
            counts[name],
        )
        for name, sizes in cells.items()
        if name
    ]
    return sorted((r for r in rows if r.total_bytes), key=lambda r: -r.total_bytes)


def _alive_at_peak(trace: Trace, peak_event: int) -> list[Buffer]:
    return [trace.buffers[i] for i in live_buffers(trace, peak_event)]


def _stacked(sizes: dict[Category, int], allocated: int) -> tuple[int, ...]:
    rounding = allocated - sum(sizes.values())
    return tuple(rounding if c is Category.ROUNDING else sizes[c] for c in STACK)
