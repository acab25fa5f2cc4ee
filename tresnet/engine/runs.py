"""What runs have written, read back: a line each, what differs between them, and a picture."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tresnet import files
from tresnet.engine import config as configs
from tresnet.engine import fields, logs, rundir
from tresnet.engine.config import TrainConfig
from tresnet.errors import ConfigError, DataError, MissingDependencyError, WriteError, needed

PICTURE = "run.svg"
# Of each panel of the picture: the axis, and the columns of the log with their names.
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


@dataclasses.dataclass(frozen=True)
class Run:
    """A run's directory, as it is at this moment.

    Attributes:
        directory: Where it writes.
        config: What it was asked to do.
        rows: Of its log.
        state: finished, running or stopped.
    """

    directory: Path
    config: TrainConfig
    rows: list[dict[str, Any]]
    state: str

    @property
    def name(self) -> str:
        """The directory's own, also of one given as `.`; printable."""
        name = os.path.basename(os.path.abspath(self.directory))
        return "".join(letter if letter.isprintable() else "?" for letter in name)

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """The rows of whole epochs."""
        return [row for row in self.rows if row["phase"] == "train"]

    def figures(self) -> dict[str, float | None]:
        """The last of each figure, the best of those that score; None where there is none."""
        last: dict[str, float | None] = {}
        for name in ("val_top1", "val_map", "loss", "val_loss", "images_per_s", "data_wait_pct"):
            found = [row[name] for row in self.epochs if row.get(name) is not None]
            best = max if name in ("val_top1", "val_map") else lambda values: values[-1]
            last[name] = best(found) if found else None
        for name in ("max_allocated_mib", "rss_peak_mib"):
            last[name] = max((row[name] for row in self.rows if row.get(name)), default=None)
        last["elapsed_s"] = self.rows[-1].get("elapsed_s") if self.rows else None
        return last


def find(places: Sequence[Path]) -> Iterator[Path]:
    """Each place that is a run's directory, or the runs' directories in it.

    Raises:
        DataError: There is none.
    """
    for place in places:
        if (place / rundir.CONFIG).exists():
            yield place
            continue
        runs = sorted(file.parent for file in place.glob(f"*/{rundir.CONFIG}"))
        if not runs:
            raise DataError(f"expected the directory of a run, or of several, got {place}")
        yield from runs


def read(directory: Path) -> Run:
    """A run's configuration and log.

    Raises:
        ConfigError: Its configuration is damaged.
        DataError: Its log is damaged.
    """
    config = configs.load(directory / rundir.CONFIG)
    path = directory / logs.FILES[1]
    rows: list[dict[str, Any]] = []
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for line in text.splitlines():
            row = json.loads(line)
            if set(row) != set(logs.COLUMNS) or not _fits(row):
                raise ValueError("columns of another log")
            rows.append(row)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(
            f"expected rows of JSON in {path}, got {type(error).__name__} at line {len(rows) + 1}:"
            f" {error}: go on with the run, which writes it anew"
        ) from error
    if any(row["phase"] == "final" for row in rows):
        state = "finished"
    else:
        state = "running" if files.is_locked(directory) else "stopped"
    return Run(directory, config, rows, state)


def _fits(row: dict[str, Any]) -> bool:
    """Whether all but the phase are numbers or absent."""
    return isinstance(row["phase"], str) and all(
        value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
        for name, value in row.items()
        if name != "phase"
    )


def differing(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Each option that is not the same in all runs, with their values."""
    flat = [configs.flatten(run.config) for run in runs]
    return {
        fields.option(name): [one[name] for one in flat]
        for name in flat[0]
        if name != "name" and any(one[name] != flat[0][name] for one in flat)
    }


def draw(run: Run) -> Path:
    """Draw loss, accuracy, speed, waiting and memory over the epochs, into the run's directory.

    Raises:
        DataError: No epoch is whole yet.
        MissingDependencyError: matplotlib is not installed.
        WriteError: The picture cannot be written.
    """
    with needed("a picture", "plot"):
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    if not run.epochs:
        raise DataError(f"expected a whole epoch in the log of {run.directory}, got none yet: wait")
    panels = [
        (axis, found)
        for axis, columns in _PANELS
        if (found := {name: columns[name] for name in columns if _points(run, name)[0]})
    ]
    # A figure of its own: pyplot would keep it and may look for a screen.
    figure = Figure(figsize=(7.5, 1 + 1.7 * len(panels)), layout="constrained")
    FigureCanvasSVG(figure)
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (axis, columns) in zip(grid, panels, strict=True):
        for color, (name, label) in zip(_COLORS, columns.items(), strict=False):
            axes.plot(*_points(run, name), color=color, label=label, marker=".", linewidth=1.2)
        axes.set_ylabel(axis)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if len(columns) > 1:
            axes.legend(frameon=False, fontsize=8)
    grid[-1].set_xlabel("epoch")
    title = f"{run.name}: {run.config.model.model}, {run.config.recipe}, {run.state}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, parse_math=False)
    path = run.directory / PICTURE
    with files.atomic_write(path) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None})
    return path


def draw_finished(directory: Path, say: rundir.Say) -> None:
    """Draw a run that has come to its end, if matplotlib is there; a picture fails no run."""
    with contextlib.suppress(MissingDependencyError):
        try:
            draw(read(directory))
        except (ConfigError, DataError, WriteError) as error:
            say(f"warning: no picture of the run: {error}")


def _points(run: Run, name: str) -> tuple[list[int], list[float]]:
    """Epochs and values of a column, where it has any."""
    rows = [row for row in run.epochs if row[name] is not None]
    return [row["epoch"] for row in rows], [row[name] for row in rows]
