"""What a run writes about itself: one table as CSV and JSONL, and TensorBoard events."""

import csv
import io
import json
import math
import secrets
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tresnet import files
from tresnet.errors import WriteError

FILES = ("log.csv", "log.jsonl")
EVENTS = "events.out.tfevents"  # how TensorBoard's names begin
TRACKED = "tracked.txt"  # what a tracker knows the run by
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


_TEXTS = {
    "loss": "loss {:.4f}",
    "accuracy": "accuracy {:.2f} %",
    "val_loss": "val loss {:.4f}",
    "val_top1": "top-1 {:.2f} %",
    "val_top5": "top-5 {:.2f} %",
    "val_map": "mAP {:.2f} %",
    "val_f1": "F1 {:.2f} %",
    "images_per_s": "{:.0f} images/s",
    "data_wait_pct": "waiting {:.0f} %",
    "lr": "lr {:.3g}",
}


class RunLog:
    """The table of a run: a row each for the phases initial and model, for each epoch, and final.

    `step` counts updates of the weights, `accuracy`, `val_top*`, `val_map` and `val_f1` are in
    percent, `images_per_s` is over all processes, `data_wait_pct` the share of the time in which
    training waited for images, `bad_steps` the updates skipped so far. A cell that does not apply
    is empty in the CSV and null in the JSONL.
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
        """Write both files anew, from the rows that belong to the state the run goes on from.

        Args:
            directory: The run directory.
            rows: So far; those written from now on are appended to this list too.
            step: The update the run goes on from.
            tensorboard: Write event files too, if the package is installed.
            track: wandb or trackio, to be told the same numbers; installed.
            config: What it is told of the run.

        Raises:
            WriteError: The files cannot be written, or the tracker refuses to begin.
        """
        self._csv, self._jsonl = (directory / name for name in FILES)
        self._rows = rows
        files.write_text(self._csv, ",".join(COLUMNS) + "\n" + _csv_lines(rows))
        files.write_text(self._jsonl, "".join(map(_json_line, rows)))
        self._events = _event_writer(directory, step if rows else None) if tensorboard else None
        self._tracker = _tracker(track, directory, config) if track else None

    def row(self, **values: Any) -> dict[str, Any]:
        """Append a row and return it whole; columns not named stay empty.

        Raises:
            WriteError: The files cannot be written.
        """
        row = {name: values.pop(name, None) for name in COLUMNS}
        if values:
            raise ValueError(f"no such columns: {sorted(values)}")
        self._rows.append(row)
        for path, line in ((self._csv, _csv_lines([row])), (self._jsonl, _json_line(row))):
            with files.explained(path), path.open("a", encoding="utf-8", newline="") as file:
                file.write(line)
        numbers = {k: v for k, v in row.items() if isinstance(v, float) and k != "elapsed_s"}
        self.scalars(row["step"], "epoch", numbers)
        return row

    def scalars(self, step: int, prefix: str, values: dict[str, float]) -> None:
        """Send numbers to TensorBoard and to the tracker alone."""
        named = {f"{prefix}/{name}": value for name, value in values.items()}
        if self._events is not None:
            for name, value in named.items():
                self._events.add_scalar(name, value, step)
        if self._tracker is not None:
            self._tracker.log(named, step=step)

    def close(self) -> None:
        """Write out what TensorBoard and the tracker hold back."""
        if self._events is not None:
            self._events.close()
        if self._tracker is not None:
            self._tracker.finish()


def _json_line(row: dict[str, Any]) -> str:
    """JSON has no NaN: null stands for it, and the CSV tells the difference."""
    plain = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
    return json.dumps(plain, allow_nan=False) + "\n"


def _csv_lines(rows: Sequence[dict[str, Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
    for row in rows:
        writer.writerow(
            {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items() if k in COLUMNS}
        )
    return buffer.getvalue()


def _event_writer(directory: Path, step: int | None) -> Any:
    """TensorBoard's writer, if it is installed; events beyond `step` come again."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(directory), purge_step=None if step is None else step + 1)


def _tracker(name: str, directory: Path, config: dict[str, Any] | None) -> Any:
    """A run of W&B, or of trackio, which copies its interface; a resumed one goes on with its own.

    Files that W&B writes, all of them with WANDB_MODE=offline, are in the run's directory.
    """
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
    except Exception as error:  # theirs have no common base
        raise WriteError(
            f"{name} cannot begin to track the run: {error}: log in to it, or leave out --track"
        ) from error


def in_words(figures: dict[str, Any]) -> str:
    """Figures of a row for people, such as `loss 1.2345  top-1 67.89 %`."""
    return "  ".join(
        text.format(figures[name]) for name, text in _TEXTS.items() if figures.get(name) is not None
    )
