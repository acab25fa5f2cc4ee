"""Pictures drawn from records: images/s against ImageNet top-1, and memory against batch size."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tresnet.errors import MissingDependencyError
from tresnet.measure.accuracy import published_top1
from tresnet.measure.report import Section, best_rows, contender, peak_mib, settings_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 150
# Names of accuracies nearer than this, in percent, would lie on each other.
_CROWDED = 0.2
_PANELS = {"bench_train": "training", "bench_infer": "inference"}
# Hues of Okabe and Ito's set, which people with colour blindness can tell apart.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P")


@dataclasses.dataclass(frozen=True)
class Point:
    """One model's speed and one of its weights' accuracy."""

    contender: str
    weights: str
    images_per_s: float
    top1: float
    record: str


@dataclasses.dataclass(frozen=True)
class Line:
    """Peak memory of one case by batch size, from one record."""

    label: str
    batches: tuple[int, ...]
    peaks_mib: tuple[float, ...]
    record: str


def speed_points(section: Section, what: str) -> list[Point]:
    """Images/s of each contender at its best against published accuracies.

    Of several records the one counts that gave a contender the most settings, the newest of those: a
    later measurement of its memory in a single setting is not its best.

    Args:
        section: one device, one PyTorch version.
        what: bench_train or bench_infer.
    """
    points: dict[tuple[str, int], list[Point]] = {}
    most: dict[tuple[str, int], int] = {}
    for record in section.records:  # oldest first
        if record.what != what:
            continue
        tried: dict[tuple[str, int], set[str]] = {}
        for row in record.rows:
            if row["status"] == "ok":
                tried.setdefault((contender(row), row["input_size"]), set()).add(settings_of(row))
        for key, row in best_rows(record.rows).items():
            if key not in tried or len(tried[key]) < most.get(key, 0):
                continue
            most[key] = len(tried[key])
            points[key] = [
                Point(contender(row), one.weights, row["p50_images_per_s"], one.top1, record.name)
                for one in published_top1(row["model"], row["input_size"])
            ]
    return [point for group in points.values() for point in group]


def memory_lines(section: Section) -> list[Line]:
    """Peak memory of each training case, from the newest record that measured it most often."""
    lines: dict[str, Line] = {}
    for record in section.records:
        if record.what != "bench_train":
            continue
        found: dict[str, dict[int, float]] = {}
        for row in record.rows:
            peak = peak_mib(row)
            if row["status"] == "ok" and peak is not None:
                label = f"{contender(row)}, {settings_of(row)}"
                found.setdefault(label, {})[row["batch_size"]] = peak
        for label, peaks in found.items():
            batches = tuple(sorted(peaks))
            if label not in lines or len(batches) >= len(lines[label].batches):
                values = tuple(peaks[batch] for batch in batches)
                lines[label] = Line(label, batches, values, record.name)
    return list(lines.values())


def draw_pictures(section: Section, folder: Path, suffix: str) -> list[Path]:
    """Draw what the section's records give, over earlier pictures of the same section.

    Args:
        section: one device, one PyTorch version.
        folder: where to, existing.
        suffix: `png` or `svg`.

    Returns:
        The files: speed, memory, or both.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    slug = re.sub(r"[^a-z0-9.]+", "-", f"{section.device}-torch{section.torch}".lower())
    files = []
    panels = {what: points for what in _PANELS if (points := speed_points(section, what))}
    if panels:
        path = folder / f"speed_{slug}.{suffix}"
        _save(path, 2 + 6 * len(panels), lambda figure: _draw_speed(figure, section, panels))
        files.append(path)
    lines = memory_lines(section)
    if lines:
        path = folder / f"memory_{slug}.{suffix}"
        _save(path, 12, lambda figure: _draw_memory(figure, section, lines))
        files.append(path)
    return files


def _save(path: Path, width: float, draw: "Callable[[Figure], None]") -> None:
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "pictures need matplotlib: pip install 'tresnet[plot]'"
        ) from error
    # A figure of its own: pyplot would keep it and may look for a screen.
    figure = Figure(figsize=(width, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    with mpl.rc_context({"svg.hashsalt": path.stem}):  # the same picture is the same file
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=_DPI, metadata=metadata)


def _draw_speed(figure: "Figure", section: Section, panels: dict[str, list[Point]]) -> None:
    names = list(dict.fromkeys(point.contender for group in panels.values() for point in group))
    axes: Sequence[Axes] = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, (what, points) in zip(axes, panels.items(), strict=True):
        for name in names:
            own = [point for point in points if point.contender == name]
            xs, ys = [point.images_per_s for point in own], [point.top1 for point in own]
            ax.plot(xs, ys, **{**_style(names.index(name)), "linestyle": ""}, label=name)
        _name_weights(ax, points)
        ax.set_xlabel(f"images/s, {_PANELS[what]}, each at its best settings")
        ax.set_ylabel("ImageNet top-1 of published weights, %")
        ax.set_xlim(0, 1.1 * max(point.images_per_s for point in points))
        ax.margins(y=0.15)
        _plain(ax)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside right upper")
    records = [point.record for group in panels.values() for point in group]
    _caption(figure, section, "accuracy as published, not measured here", records)


def _name_weights(axes: "Axes", points: Sequence[Point]) -> None:
    """Join the contenders that share weights, and name the weights at the fastest."""
    for weights in dict.fromkeys(point.weights for point in points):
        own = sorted(
            (point for point in points if point.weights == weights), key=lambda p: p.images_per_s
        )
        xs, top1 = [point.images_per_s for point in own], own[-1].top1
        axes.plot(xs, [top1] * len(xs), color="#999999", linewidth=0.8, zorder=0)
        crowded = any(0 < point.top1 - top1 < _CROWDED for point in points)
        axes.annotate(
            weights,
            (xs[-1], top1),
            xytext=(0, -14 if crowded else 7),
            textcoords="offset points",
            ha="right",
            fontsize=7,
        )


def _draw_memory(figure: "Figure", section: Section, lines: Sequence[Line]) -> None:
    axes = figure.subplots()
    for index, line in enumerate(lines):
        axes.plot(line.batches, line.peaks_mib, label=line.label, **_style(index))
    whole = "" if section.on_gpu else " of the whole process"
    axes.set_xlabel("images in a batch")
    axes.set_ylabel(f"peak memory{whole} in a training step, MiB")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    figure.legend(frameon=False, fontsize=7, loc="outside right upper")
    _plain(axes)
    _caption(figure, section, "", [line.record for line in lines])


def _style(index: int) -> dict[str, Any]:
    return {
        "color": _COLORS[index % len(_COLORS)],
        "marker": _MARKERS[(index // len(_COLORS) + index) % len(_MARKERS)],
        "markersize": 6,
        "linewidth": 1.2,
    }


def _plain(axes: "Axes") -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _caption(figure: "Figure", section: Section, note: str, records: Sequence[str]) -> None:
    figure.suptitle(section.title, x=0.01, ha="left")
    sources = f"records: {', '.join(dict.fromkeys(records))}"
    figure.supxlabel(f"{sources}; {note}" if note else sources, fontsize=6, x=0.01, ha="left")
