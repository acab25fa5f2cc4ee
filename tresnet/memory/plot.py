"""Draw memory over one step, with matplotlib.

The x axis has the operations of the last traced step, at the highest allocation within each.
Allocated bytes are stacked by category, reserved bytes are a dashed line, and the peak names its
operation. Phases are separated by vertical lines.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tresnet.errors import InputError, needed
from tresnet.files import atomic_write
from tresnet.memory.device import MIB
from tresnet.memory.prediction import MemoryPrediction
from tresnet.memory.trace import Category, Operation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# In the order of stacking: long-lived categories first. Colours of Okabe and Ito's set, which
# can be distinguished with colour blindness.
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
_DPI = 150
# Space above the curves for the names of the phases and of the peak.
_HEADROOM = 1.3


@dataclass(frozen=True)
class Point:
    """The fullest moment of one operation, with its bytes by category."""

    operation: Operation
    allocated_bytes: int
    reserved_bytes: int
    by_category_bytes: dict[Category, int]


def timeline(prediction: MemoryPrediction) -> list[Point]:
    """Return the points of the last step, in the order in which operations ran."""
    trace, replayed = prediction.trace, prediction.replay
    first = trace.step_starts[-1] if trace.step_starts else 0
    sizes: dict[Category, int] = defaultdict(int)
    points: dict[int, Point] = {}
    for index, allocated in enumerate(replayed.allocated_bytes):
        event = trace.events[index]
        buffer = trace.buffers[event.buffer]
        sizes[buffer.category] += buffer.n_bytes if event.alive else -buffer.n_bytes
        known = points.get(event.op)
        if index < first or (known is not None and allocated <= known.allocated_bytes):
            continue
        points[event.op] = Point(
            trace.operations[event.op],
            allocated,
            replayed.reserved_bytes[index],
            {**sizes, Category.ROUNDING: allocated - sum(sizes.values())},
        )
    return [points[op] for op in sorted(points)]


def plot(prediction: MemoryPrediction, path: str | Path) -> Path:
    """Draw the last step to a .png, .svg or .pdf: allocated by category, reserved, phases, peak.

    Another suffix raises InputError, a file that cannot be written WriteError, and a missing
    matplotlib MissingDependencyError.
    """
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in _SUFFIXES:
        raise InputError(f"expected a path ending in {', '.join(_SUFFIXES)}, got {path.name!r}")
    with needed("a picture", "plot"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    # Not by pyplot, which would keep the figure and may need a display.
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    _draw(figure.subplots(), prediction)
    metadata = {"Date": None} if kind == ".svg" else None
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format=kind[1:], dpi=_DPI, metadata=metadata)
    return path


def _draw(axes: "Axes", prediction: MemoryPrediction) -> None:
    points = timeline(prediction)
    x = list(range(len(points)))
    series = {c: [p.by_category_bytes.get(c, 0) / MIB for p in points] for c in COLORS}
    shown = [category for category in COLORS if any(series[category])]
    axes.stackplot(
        x,
        [series[category] for category in shown],
        colors=[COLORS[category] for category in shown],
        labels=[str(category) for category in shown],
        step="mid",
        linewidth=0,
    )
    reserved = [p.reserved_bytes / MIB for p in points]
    axes.plot(x, reserved, color="black", linewidth=1, linestyle="--", label="reserved")
    _mark_phases(axes, points)
    _mark_peak(axes, points, prediction)
    axes.set_xlim(0, max(len(points) - 1, 1))
    axes.set_ylim(0, max(reserved, default=1) * _HEADROOM)
    axes.set_xlabel("operation of the step")
    axes.set_ylabel("MiB")
    axes.set_title(f"{prediction.model}: {prediction.plan.describe()}", loc="left")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _mark_phases(axes: Any, points: list[Point]) -> None:
    first = 0
    for phase, run in groupby(p.operation.phase for p in points):
        length = len(list(run))
        axes.axvline(first, color="#999999", linewidth=0.6)
        # The name of a short phase does not fit.
        if length > len(points) / 25:
            axes.annotate(
                phase.value,
                (first + length / 2, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(0, -4),
                textcoords="offset points",
                ha="center",
                va="top",
                color="#444444",
            )
        first += length


def _mark_peak(axes: Any, points: list[Point], prediction: MemoryPrediction) -> None:
    if not points:
        return
    at = max(range(len(points)), key=lambda i: points[i].allocated_bytes)
    height = points[at].allocated_bytes / MIB
    operation = points[at].operation
    where = f"\nin {operation.module}" if operation.module else ""
    left = at > len(points) / 2
    axes.plot([at], [height], marker="o", color="black", markersize=4)
    axes.annotate(
        f"peak {height:,.0f} MiB\n{operation.name}{where}",
        (at, height),
        xytext=(at + (-0.03 if left else 0.03) * len(points), 0.93),
        textcoords=("data", "axes fraction"),
        ha="right" if left else "left",
        va="top",
        fontsize=9,
        arrowprops={"arrowstyle": "-", "color": "black", "linewidth": 0.7},
        bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
    )
