"""Log of a run: a table as JSONL and CSV, a plot, TensorBoard events, and W&B or trackio.

An epoch's row is on disk before the epoch's checkpoint is saved. On resume, rows after the
checkpoint are dropped. So no row is lost or written twice.
"""

import contextlib
import csv
import dataclasses
import io
import itertools
import json
import math
import os
import secrets
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tresnet import writing
from tresnet.engine.config import Resolved
from tresnet.engine.state import Progress
from tresnet.errors import WriteError
from tresnet.measure.memory_meter import MemorySnapshot

TABLE, CSV = "log.jsonl", "log.csv"
EVENTS = "events.out.tfevents"  # prefix of TensorBoard's files
TRACKED = "tracked.txt"  # holds the run's id in W&B or trackio
# Columns of the table, and a column's text in the printed lines; None: it is not printed.
COLUMNS: dict[str, str | None] = {
    "phase": None,
    "epoch": None,
    "step": None,
    "lr": "lr {:.3g}",
    "loss": "loss {:.4f}",
    "accuracy": "accuracy {:.2f} %",
    "val_loss": "val loss {:.4f}",
    "val_top1": "top-1 {:.2f} %",
    "val_top5": "top-5 {:.2f} %",
    "val_map": "mAP {:.2f} %",
    "val_f1": "F1 {:.2f} %",
    "images_per_s": "{:.0f} images/s",
    "data_wait_pct": "waiting {:.0f} %",
    "set_up_s": None,
    "bad_steps": None,
    **dict.fromkeys(MemorySnapshot().to_dict()),
    "elapsed_s": None,
}

PICTURE = "run.svg"
# Panels of a run's plot: the label of the y axis, and the legend of each log column.
_PANELS: tuple[tuple[str, dict[str, str]], ...] = (
    ("loss", {"loss": "training", "val_loss": "validation"}),
    ("accuracy, %", {"accuracy": "training", "val_top1": "top-1", "val_top5": "top-5"}),
    ("mAP and F1, %", {"val_map": "mAP", "val_f1": "F1"}),
    ("images/s", {"images_per_s": "training"}),
    ("waiting for data, %", {"data_wait_pct": "training"}),
    (
        "memory, MiB",
        {"max_allocated_mib": "allocated", "reserved_mib": "reserved", "rss_peak_mib": "process"},
    ),
)
_COLORS = ("#0072b2", "#d55e00", "#009e73")  # distinct for colour-blind readers (Okabe and Ito)


class RunLog:
    """Table of a run: rows `initial` and `model`, a row for each epoch, and a row `final`.

    `initial` and `model` hold the memory before and after the model is built; `final` holds the
    metrics of the best weights. Of the `step` optimizer steps so far, `bad_steps` were skipped.
    Accuracies are in percent. A missing or non-finite value is null in JSONL and empty in CSV.
    """

    def __init__(
        self, directory: Path, rows: list[dict[str, Any]], step: int, config: Resolved
    ) -> None:
        """Begin a log with `rows`; if there are any, drop TensorBoard's events after `step`."""
        self.rows = rows
        self._jsonl, self._csv = directory / TABLE, directory / CSV
        writing.write_text(self._jsonl, "".join(json.dumps(row) + "\n" for row in rows))
        writing.write_text(self._csv, _to_csv(rows))
        run = config.run
        self._events = _event_writer(directory, step if rows else None) if run.tensorboard else None
        self._tracker = _tracker(run.track, directory, config) if run.track else None

    def phase(
        self,
        phase: str,
        progress: Progress,
        memory: MemorySnapshot,
        elapsed_s: float,
        **values: float | None,
    ) -> None:
        """Append the row of a phase, or raise WriteError; `values` maps column names to values."""
        figures = {
            name: value  # JSON has no NaN and no infinity
            for name, value in (values | memory.to_dict()).items()
            if value is not None and math.isfinite(value)
        }
        position = {"phase": phase, "epoch": progress.epoch, "step": progress.global_step}
        row = {**dict.fromkeys(COLUMNS), **position, **figures, "elapsed_s": elapsed_s}
        self.rows.append(row)
        # Write log.csv first: a run killed with a complete log.jsonl would not complete log.csv.
        writing.write_text(self._csv, _to_csv(self.rows))
        with writing.as_write_error(self._jsonl), self._jsonl.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())  # puts the row on disk before the epoch's checkpoint
        self.scalars(progress.global_step, "epoch", figures)

    def scalars(self, step: int, prefix: str, values: dict[str, float]) -> None:
        """Send values to TensorBoard and to W&B or trackio, but add no row to the table."""
        named = {f"{prefix}/{name}": value for name, value in values.items()}
        if self._events is not None:
            for name, value in named.items():
                self._events.add_scalar(name, value, step)
        if self._tracker is not None:
            self._tracker.log(named, step=step)

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
        if self._tracker is not None:
            self._tracker.finish()


def printed(figures: dict[str, float | None], memory: MemorySnapshot) -> str:
    """Return a line of figures and the peak memory, such as `loss 1.2345  lr 0.1  712 MiB`."""
    texts = [
        text.format(value)
        for name, value in figures.items()
        if value is not None and (text := COLUMNS.get(name)) is not None
    ]
    peak = memory.peak_mib
    return "  ".join([*texts, "" if peak is None else f"{peak:.0f} MiB"])


def read_rows(directory: Path, epochs: int) -> list[dict[str, Any]]:
    """Return the rows of the first `epochs` epochs; a killed run may have left later rows.

    Another version may have written the rows: missing columns are None, unknown columns are kept.
    """
    rows = []
    with contextlib.suppress(OSError, ValueError):
        for line in (directory / TABLE).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("epoch"), int):
                break
            rows.append(dict.fromkeys(COLUMNS) | row)
    return [row for row in rows if row["epoch"] <= epochs]


def _to_csv(rows: Sequence[dict[str, Any]]) -> str:
    buffer, columns = io.StringIO(), dict.fromkeys([*COLUMNS, *itertools.chain(*rows)])
    writer: csv.DictWriter[str] = csv.DictWriter(buffer, [*columns], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    return buffer.getvalue()


def _event_writer(directory: Path, step: int | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(directory), purge_step=None if step is None else step + 1)


def _tracker(name: str, directory: Path, config: Resolved) -> Any:
    path = directory / TRACKED
    if not path.exists():
        writing.write_text(path, secrets.token_hex(4))
    key = path.read_text(encoding="utf-8")
    options: dict[str, Any] = {"id": key, "dir": str(directory)} if name == "wandb" else {}
    options |= {"project": "tresnet", "name": f"{directory.name}-{key}", "resume": "allow"}
    try:
        return import_module(name).init(config=dataclasses.asdict(config), **options)
    except Exception as error:  # the trackers' errors have no common base
        raise WriteError(
            f"{name} cannot begin to track the run: {error}: log in to it, or leave out --track"
        ) from error


def draw(directory: Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Plot the log's `rows` to `run.svg` if matplotlib is installed."""
    try:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        return
    epochs = [row for row in rows if row["phase"] == "train"]
    logged = {name for row in epochs for name, value in row.items() if value is not None}
    panels = [(axis, columns) for axis, columns in _PANELS if logged & columns.keys()]
    if not panels:
        return
    # pyplot is not used, because it keeps every figure in memory and may need a display.
    figure = Figure(figsize=(7.5, 1 + 1.7 * len(panels)), layout="constrained")
    FigureCanvasSVG(figure)
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (axis, columns) in zip(grid, panels, strict=True):
        drawn = [name for name in columns if name in logged]
        for color, name in zip(_COLORS[: len(drawn)], drawn, strict=True):
            points = [(row["epoch"], row[name]) for row in epochs if row[name] is not None]
            style = {"color": color, "marker": ".", "linewidth": 1.2}
            axes.plot(*zip(*points, strict=True), label=columns[name], **style)
        axes.set_ylabel(axis)
        if axis.endswith("MiB"):
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if len(drawn) > 1:
            axes.legend(frameon=False, fontsize=8)
    grid[-1].set_xlabel("epoch")
    grid[-1].xaxis.get_major_locator().set_params(integer=True)
    printable = "".join(letter if letter.isprintable() else "?" for letter in title)
    figure.suptitle(printable, x=0.01, ha="left", fontsize=10, parse_math=False)
    with writing.atomic_write(directory / PICTURE) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None})
