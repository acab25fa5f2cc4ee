"""A picture of memory over one step, with matplotlib."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tresnet.errors import MissingDependencyError
from tresnet.memory.output import check_path, writing
from tresnet.memory.palette import COLORS
from tresnet.memory.result import Prediction
from tresnet.memory.sizes import MIB
from tresnet.memory.timeline import STACK, Point, phases, timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SUFFIXES = (".png", ".svg", ".pdf")
_DPI = 150
# Room above the curves for the names of the phases and of the peak.
_HEADROOM = 1.3


def check_plot(path: str | Path) -> Path:
    """Whether `plot` can draw there, asked before a prediction is made.

    Raises:
        InputError: another suffix, or a folder that is not there or not writable.
        MissingDependencyError: matplotlib is not installed.
    """
    path = check_path(path, _SUFFIXES)
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "pictures need matplotlib: pip install 'tresnet[plot]'"
        ) from error
    return path


def plot(prediction: Prediction, path: str | Path) -> Path:
    """Draw the last step: allocated by category, reserved, the phases and the peak.

    Args:
        prediction: what to draw.
        path: where to, ending in .png, .svg or .pdf.

    Raises:
        InputError: as for `check_plot`, or the file cannot be written.
        MissingDependencyError: matplotlib is not installed.
    """
    path = check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A figure of its own: pyplot would keep it and may look for a screen.
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    _draw(figure.subplots(), prediction)
    kind = path.suffix.lower().removeprefix(".")
    with writing(path) as temporary:
        figure.savefig(
            temporary, format=kind, dpi=_DPI, metadata={"Date": None} if kind == "svg" else None
        )
    return path


def _draw(axes: "Axes", prediction: Prediction) -> None:
    points = timeline(prediction)
    x = list(range(len(points)))
    series = list(zip(*(p.by_category_bytes for p in points), strict=True))
    shown = [i for i, _ in enumerate(STACK) if series and any(series[i])]
    axes.stackplot(
        x,
        [[n / MIB for n in series[i]] for i in shown],
        colors=[COLORS[STACK[i]] for i in shown],
        labels=[str(STACK[i]) for i in shown],
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
    for span in phases(points):
        axes.axvline(span.first, color="#999999", linewidth=0.6)
        # A phase of a few operations has no room for its name.
        if span.last - span.first > len(points) / 25:
            axes.annotate(
                span.phase.value,
                ((span.first + span.last) / 2, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(0, -4),
                textcoords="offset points",
                ha="center",
                va="top",
                color="#444444",
            )


def _mark_peak(axes: Any, points: list[Point], prediction: Prediction) -> None:
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
