"""The log of a run: one table as JSONL and CSV, TensorBoard events, and trackers.

A row is appended and synced before the checkpoint that it belongs to. On resume, rows after the
checkpoint are dropped, so that no row is lost or doubled.
"""

import contextlib
import csv
import io
import json
import math
import os
import secrets
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tresnet import files
from tresnet.engine.state import Progress
from tresnet.errors import WriteError
from tresnet.measure.memory import MemorySnapshot

TABLE, CSV = "log.jsonl", "log.csv"
EVENTS = "events.out.tfevents"  # prefix of TensorBoard's files
TRACKED = "tracked.txt"  # holds the tracker's id of the run
COLUMNS = (
    "phase",
    "epoch",
    "step",
    "lr",
    "loss",
    "accuracy",
    "val_loss",
    "val_top1",
    "val_top5",
    "val_map",
    "val_f1",
    "images_per_s",
    "data_wait_pct",
    "bad_steps",
    "allocated_mib",
    "reserved_mib",
    "max_allocated_mib",
    "device_used_mib",
    "rss_peak_mib",
    "elapsed_s",
)


class RunLog:
    """The table of a run: a row for each epoch, and for the phases initial, model and final.

    `step` counts optimizer steps. `accuracy`, `val_top*`, `val_map` and `val_f1` are in percent,
    and `images_per_s` is over all processes. `data_wait_pct` is the percentage of the time in which
    training waited for images, `bad_steps` the optimizer steps skipped so far. A cell that does not
    apply, or is not finite, is null in `log.jsonl` and empty in `log.csv`.
    """

    def __init__(
        self,
        directory: Path,
        rows: list[dict[str, Any]],
        step: int,
        tensorboard: bool,
        track: str | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        """Begin a log, or continue the one of a resumed state after its `rows`."""
        self.rows = rows
        self._jsonl, self._csv = directory / TABLE, directory / CSV
        files.write_text(self._jsonl, "".join(map(_json_line, rows)))
        files.write_text(self._csv, _to_csv(rows))
        self._events = _event_writer(directory, step if rows else None) if tensorboard else None
        self._tracker = _tracker(track, directory, config) if track else None

    def phase(
        self, phase: str, progress: Progress, memory: MemorySnapshot, elapsed_s: float, **more: Any
    ) -> None:
        """Append the row of a phase; see `row`."""
        place = {"phase": phase, "epoch": progress.epoch, "step": progress.global_step}
        self.row(**place, elapsed_s=elapsed_s, **memory.to_dict(), **more)

    def row(self, **values: Any) -> None:
        """Append a row, or raise WriteError; columns that are not given stay empty."""
        row = {name: values.pop(name, None) for name in COLUMNS}
        if values:
            raise ValueError(f"no such columns: {sorted(values)}")
        for name, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                row[name] = None  # JSON has no NaN
        self.rows.append(row)
        with files.explained(self._jsonl), self._jsonl.open("a", encoding="utf-8") as file:
            file.write(_json_line(row))
            file.flush()
            os.fsync(file.fileno())  # before the checkpoint of this row is written
        files.write_text(self._csv, _to_csv(self.rows))
        numbers = {k: v for k, v in row.items() if isinstance(v, float) and k != "elapsed_s"}
        self.scalars(row["step"], "epoch", numbers)

    def scalars(self, step: int, prefix: str, values: dict[str, float]) -> None:
        """Send figures only to TensorBoard and to the tracker."""
        named = {f"{prefix}/{name}": value for name, value in values.items()}
        if self._events is not None:
            for name, value in named.items():
                self._events.add_scalar(name, value, step)
        if self._tracker is not None:
            self._tracker.log(named, step=step)

    def close(self) -> None:
        """Flush TensorBoard and the tracker."""
        if self._events is not None:
            self._events.close()
        if self._tracker is not None:
            self._tracker.finish()


def read_rows(directory: Path, epochs: int) -> list[dict[str, Any]]:
    """Return a run's rows up to `epochs` complete epochs; a kill may have left more, or a part."""
    rows = []
    with contextlib.suppress(OSError, ValueError):
        for line in (directory / TABLE).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            known = isinstance(row, dict) and row.keys() == set(COLUMNS)
            if not (known and isinstance(row["epoch"], int)):
                break
            rows.append(row)
    return [row for row in rows if row["epoch"] <= epochs]


def _json_line(row: dict[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _to_csv(rows: Sequence[dict[str, Any]]) -> str:
    buffer = io.StringIO()
    writer: csv.DictWriter[str] = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
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


def _tracker(name: str, directory: Path, config: dict[str, Any] | None) -> Any:
    """Begin or continue the run in W&B, or in trackio, which has the same interface."""
    known = directory / TRACKED
    if not known.exists():
        files.write_text(known, secrets.token_hex(4))
    key = known.read_text(encoding="utf-8")
    own = {"id": key, "dir": str(directory)} if name == "wandb" else {}
    label = f"{directory.name}-{key}"
    try:
        return import_module(name).init(
            project="tresnet", name=label, config=config, resume="allow", **own
        )
    except Exception as error:  # the trackers' errors have no common base
        raise WriteError(
            f"{name} cannot begin to track the run: {error}: log in to it, or leave out --track"
        ) from error
