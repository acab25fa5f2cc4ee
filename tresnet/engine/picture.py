"""The picture of a finished run: loss, accuracy, speed, waiting and memory over its epochs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tresnet.files import atomic_write

PICTURE = "run.svg"
# Panels: the axis, and the columns of the log with their names.
_PANELS: tuple[tuple[str, dict[str, str]], ...] = (
    ("loss", {"loss": "training", "val_loss": "validation"}),
    (
        "accuracy, %",
        {"accuracy": "training", "val_top1": "top-1", "val_top5": "top-5", "val_map": "mAP"},
    ),
    ("images/s", {"images_per_s": "training"}),
    ("waiting for data, %", {"data_wait_pct": "training"}),
    (
        "memory, MiB",
        {"max_allocated_mib": "allocated", "reserved_mib": "reserved", "rss_peak_mib": "process"},
    ),
)
_COLORS = ("#0072b2", "#d55e00", "#009e73")


def draw(directory: Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Draw the log's `rows` as `run.svg` if matplotlib is installed, or raise WriteError."""
    try:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        return
    epochs = [row for row in rows if row["phase"] == "train"]
    known = {name for row in epochs for name, value in row.items() if value is not None}
    panels = [(axis, columns) for axis, columns in _PANELS if known & columns.keys()]
    if not panels:
        return
    # Not by pyplot, which would keep the figure and may need a display.
    figure = Figure(figsize=(7.5, 1 + 1.7 * len(panels)), layout="constrained")
    FigureCanvasSVG(figure)
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (axis, columns) in zip(grid, panels, strict=True):
        drawn = [name for name in columns if name in known]
        for color, name in zip(_COLORS, drawn, strict=False):
            points = [(row["epoch"], row[name]) for row in epochs if row[name] is not None]
            style = {"color": color, "marker": ".", "linewidth": 1.2}
            axes.plot(*zip(*points, strict=True), label=columns[name], **style)
        axes.set_ylabel(axis)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if len(drawn) > 1:
            axes.legend(frameon=False, fontsize=8)
    grid[-1].set_xlabel("epoch")
    printable = "".join(letter if letter.isprintable() else "?" for letter in title)
    figure.suptitle(printable, x=0.01, ha="left", fontsize=10, parse_math=False)
    with atomic_write(directory / PICTURE) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None})
