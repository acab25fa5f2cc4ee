"""Pictures of `tresnet bench report`: speed against published accuracy, memory against batch size."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tresnet.errors import MissingDependencyError
from tresnet.measure.report import (
    STEPS,
    Record,
    Row,
    best_rows,
    contender,
    peaks_by_batch,
    published_top1,
    settings_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Hues of Okabe and Ito's set, which people with colour blindness can tell apart.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P")


def speed_points(section: Sequence[Record], what: str) -> list[tuple[Row, str]]:
    """Each contender at its best, with the name of the record.

    Of several records the one counts that gave a contender the most settings, the newest of those: a
    later measurement of its memory in a single setting is not its best.
    """
    best: dict[tuple[str, int], tuple[int, Row, str]] = {}
    for record in section:  # oldest first
        if record.what != what:
            continue
        done = [row for row in record.rows if row["status"] == "ok"]
        for row in best_rows(done):
            key = (contender(row), row["input_size"])
            tried = len({settings_of(o) for o in done if (contender(o), o["input_size"]) == key})
            if key not in best or tried >= best[key][0]:
                best[key] = tried, row, record.name
    return [(row, name) for _, row, name in best.values()]


def memory_lines(section: Sequence[Record]) -> dict[str, tuple[dict[int, float], str]]:
    """Peaks of each training case by batch size, from the newest record that has most of them."""
    lines: dict[str, tuple[dict[int, float], str]] = {}
    for record in section:
        for case, peaks in peaks_by_batch(record).items() if record.what == "bench_train" else ():
            label = ", ".join(case)
            if label not in lines or len(peaks) >= len(lines[label][0]):
                lines[label] = dict(sorted(peaks.items())), record.name
    return lines


def draw_pictures(section: Sequence[Record], folder: Path, suffix: str) -> list[Path]:
    """Draw a section's speed against published accuracy, and its memory against batch size.

    Args:
        section: one device, one PyTorch version.
        folder: where to, existing; an earlier picture of the section is replaced.
        suffix: `png` or `svg`.

    Returns:
        The files: speed, memory, both or none.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    title = section[0].title
    slug = re.sub(r"[^a-z0-9.]+", "-", title.lower().replace(", pytorch ", "-torch"))
    files = []
    panels = {what: found for what in STEPS if (found := speed_points(section, what))}
    if any(published_top1(r["model"], r["input_size"]) for p in panels.values() for r, _ in p):
        files.append(folder / f"speed_{slug}.{suffix}")
        _save(files[-1], title, 2 + 6 * len(panels), lambda figure: _draw_speed(figure, panels))
    lines = memory_lines(section)
    if lines:
        files.append(folder / f"memory_{slug}.{suffix}")
        whole = "" if section[0].on_gpu else " of the whole process"
        _save(files[-1], title, 12, lambda figure: _draw_memory(figure, lines, whole))
    return files


def _save(path: Path, title: str, width: float, draw: "Callable[[Figure], Iterable[str]]") -> None:
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
    records = ", ".join(dict.fromkeys(draw(figure)))
    figure.suptitle(title, x=0.01, ha="left")
    figure.supxlabel(f"records: {records}", fontsize=6, x=0.01, ha="left")
    with mpl.rc_context({"svg.hashsalt": path.stem}):  # the same picture is the same file
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)


def _draw_speed(figure: "Figure", panels: dict[str, list[tuple[Row, str]]]) -> Iterable[str]:
    """Images/s of each contender against the accuracy of its published weights."""
    names = list(dict.fromkeys(contender(row) for found in panels.values() for row, _ in found))
    axes: Sequence[Axes] = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, (what, found) in zip(axes, panels.items(), strict=True):
        for row, _ in found:
            top1 = published_top1(row["model"], row["input_size"])
            speeds = [row["p50_images_per_s"]] * len(top1)
            style = {**_style(names.index(contender(row))), "linestyle": ""}
            ax.plot(speeds, list(top1.values()), label=contender(row), **style)
            for weights, y in top1.items():
                ax.annotate(weights, (speeds[0], y), xytext=(0, 7), fontsize=7, ha="right",
                            textcoords="offset points")  # fmt: skip
        ax.set_xlabel(f"images/s, {STEPS[what]}, each at its best settings")
        ax.set_ylabel("ImageNet top-1 of published weights (not measured here), %")
        ax.set_xlim(left=0)
        ax.margins(x=0.1, y=0.15)
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, loc="outside right upper")
    return [record for found in panels.values() for _, record in found]


def _draw_memory(
    figure: "Figure", lines: dict[str, tuple[dict[int, float], str]], whole: str
) -> Iterable[str]:
    axes = figure.subplots()
    for index, (label, (peaks, _)) in enumerate(lines.items()):
        axes.plot(list(peaks), list(peaks.values()), label=label, **_style(index))
    axes.set_xlabel("images in a batch")
    axes.set_ylabel(f"peak memory{whole} in a training step, MiB")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    figure.legend(frameon=False, fontsize=7, loc="outside right upper")
    return [record for _, record in lines.values()]


def _style(index: int) -> dict[str, Any]:
    marker = _MARKERS[(index // len(_COLORS) + index) % len(_MARKERS)]
    return {"color": _COLORS[index % len(_COLORS)], "marker": marker, "linewidth": 1.2}
