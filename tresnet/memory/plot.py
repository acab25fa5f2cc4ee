"""Plot the predicted memory over the operations of the last traced step, with matplotlib."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from tresnet.errors import InputError, needed
from tresnet.files import atomic_write
from tresnet.memory.device import MIB
from tresnet.memory.prediction import MemoryPrediction
from tresnet.memory.trace import Category, Operation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The plot stacks the categories in this order, long-lived ones first. Five colours are from Okabe
# and Ito's palette, which people with colour blindness can distinguish.
COLORS = {
    Category.PARAMETERS: "#0072b2",
    Category.BUFFERS: "#5fa8d3",
    Category.GRADIENTS: "#d55e00",
    Category.OPTIMIZER: "#8c564b",
    Category.EMA: "#b07aa1",
    Category.BUCKETS: "#e6a157",
    Category.INPUT: "#7f7f7f",
    Category.CAST_WEIGHTS: "#56b4e9",
    Category.ACTIVATIONS: "#009e73",
    Category.ACTIVATION_GRADIENTS: "#f0c419",
    Category.TEMPORARY: "#cc79a7",
    Category.WORKSPACE: "#4d4d4d",
    Category.ROUNDING: "#c8c8c8",
}
_SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Point:
    """Memory during one operation, at the moment when the most bytes are allocated."""

    operation: Operation
    allocated_bytes: int
    reserved_bytes: int
    by_category_bytes: dict[Category, int]


def timeline(prediction: MemoryPrediction) -> list[Point]:
    """Return a point for each operation that allocates or frees in the last step, in order."""
    trace, replayed = prediction.trace, prediction.replay
    first = trace.step_starts[-1] if trace.step_starts else 0
    sizes: dict[Category, int] = defaultdict(int)
    points: dict[int, Point] = {}
    for index, allocated in enumerate(replayed.allocated_bytes):
        event = trace.events[index]
        buffer = trace.buffers[event.buffer]
        sizes[buffer.category] += buffer.n_bytes if event.alive else -buffer.n_bytes
        highest = points.get(event.op)
        if index < first or (highest is not None and allocated <= highest.allocated_bytes):
            continue
        points[event.op] = Point(
            trace.operations[event.op],
            allocated,
            replayed.reserved_bytes[index],
            {**sizes, Category.ROUNDING: allocated - sum(sizes.values())},
        )
    return [points[op] for op in sorted(points)]


def plot(prediction: MemoryPrediction, path: str | Path) -> Path:
    """Plot the memory over the last traced step into a .png, .svg or .pdf file.

    Another suffix raises InputError. A file that cannot be written raises WriteError. Without
    matplotlib, MissingDependencyError is raised.
    """
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in _SUFFIXES:
        raise InputError(f"expected a path ending in {', '.join(_SUFFIXES)}, got {path.name!r}")
    with needed("a picture", "plot"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    # pyplot is avoided, because it would keep the figure in memory and may need a display.
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    _draw(figure.subplots(), prediction)
    metadata = {"Date": None} if kind == ".svg" else None
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format=kind[1:], dpi=150, metadata=metadata)
    return path


def _draw(axes: "Axes", prediction: MemoryPrediction) -> None:
    axes.set_title(f"{prediction.model}: {prediction.plan.describe()}", loc="left")
    points = timeline(prediction)
    if not points:  # the device was full before the last step began
        return
    series = {c: [p.by_category_bytes.get(c, 0) / MIB for p in points] for c in COLORS}
    shown = {str(category): mib for category, mib in series.items() if any(mib)}
    colors = [COLORS[Category(name)] for name in shown]
    x = range(len(points))
    axes.stackplot(x, *shown.values(), labels=shown, colors=colors, step="mid", linewidth=0)
    reserved = [p.reserved_bytes / MIB for p in points]
    axes.plot(x, reserved, color="black", linewidth=1, linestyle="--", label="reserved")
    axes.margins(x=0)
    axes.set_ylim(0, max(reserved) * 1.3)  # leaves space for the labels of the phases and the peak
    axes.set_xlabel("operation of the step")
    axes.set_ylabel("MiB")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, reverse=True)
    first = 0
    for phase, run in groupby(p.operation.phase for p in points):
        length = len(list(run))
        axes.axvline(first, color="#999999", linewidth=0.6)
        if length > len(points) / 25:  # a shorter phase has no space for its name
            middle, top = first + length / 2, axes.get_ylim()[1] * 0.99
            axes.text(middle, top, phase.value, ha="center", va="top", color="#444444")
        first += length
    peak = max(x, key=lambda i: points[i].allocated_bytes)
    height, operation = points[peak].allocated_bytes / MIB, points[peak].operation
    where = f"\nin {operation.module}" if operation.module else ""
    on_the_left = peak > len(points) / 2
    axes.annotate(
        f"peak {height:,.0f} MiB\n{operation.name}{where}",
        (peak, height),
        xytext=(peak + (-0.03 if on_the_left else 0.03) * len(points), 0.93),
        textcoords=("data", "axes fraction"),
        ha="right" if on_the_left else "left",
        va="top",
        fontsize=9,
        arrowprops={"arrowstyle": "-|>", "linewidth": 0.7},
    )
