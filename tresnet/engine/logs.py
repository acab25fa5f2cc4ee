"""What a run writes about itself: one table as CSV and JSONL, and TensorBoard events."""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

from tresnet.errors import TrainingError
from tresnet.files import atomic_write

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
    "allocated_mib",
    "reserved_mib",
    "max_allocated_mib",
    "device_used_mib",
    "rss_peak_mib",
    "elapsed_s",
)


class RunLog:
    """The table of a run: a row each for the phases initial and model, for each epoch, and final.

    `step` counts updates of the weights, `accuracy`, `val_top*`, `val_map` and `val_f1` are in percent, `images_per_s`
    is over all processes. A cell that does not apply is empty in the CSV and null in the JSONL.
    """

    def __init__(self, directory: Path, until_step: int | None, tensorboard: bool) -> None:
        """Open the log.

        Args:
            directory: The run directory.
            until_step: None for a new run; for a resumed one the step it goes on from: rows
                beyond it were written after the checkpoint and come again.
            tensorboard: Write event files too, if the package is installed.

        Raises:
            TrainingError: The files cannot be written.
        """
        self._csv, self._jsonl = directory / "log.csv", directory / "log.jsonl"
        try:
            if until_step is None or not self._csv.exists():
                self._csv.write_text(_csv_line(COLUMNS), encoding="utf-8", newline="")
                self._jsonl.write_text("", encoding="utf-8")
            else:
                _cut_csv(self._csv, until_step)
                _cut_jsonl(self._jsonl, until_step)
        except OSError as error:
            raise _not_written(error) from error
        self._events = _event_writer(directory, until_step) if tensorboard else None

    def row(self, **values: Any) -> None:
        """Append a row; columns not named stay empty.

        Raises:
            TrainingError: The files cannot be written.
        """
        cells = {name: values.pop(name, None) for name in COLUMNS}
        if values:
            raise ValueError(f"no such columns: {sorted(values)}")
        try:
            with self._csv.open("a", encoding="utf-8", newline="") as file:
                file.write(_csv_line([_cell(value) for value in cells.values()]))
            with self._jsonl.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_finite(cells), allow_nan=False) + "\n")
        except OSError as error:
            raise _not_written(error) from error
        numbers = {k: v for k, v in cells.items() if isinstance(v, float) and k != "elapsed_s"}
        self.scalars(cells["step"], "epoch", numbers)

    def scalars(self, step: int, prefix: str, values: dict[str, float]) -> None:
        """Send numbers to TensorBoard alone."""
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(f"{prefix}/{name}", value, step)

    def close(self) -> None:
        """Write out what TensorBoard holds back."""
        if self._events is not None:
            self._events.close()


def _finite(cells: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: null stands for it, and the CSV tells the difference."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in cells.items()
    }


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _csv_line(cells: Any) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()


def _cut_csv(path: Path, until_step: int) -> None:
    rows = list(csv.reader(_whole_lines(path)))
    step = COLUMNS.index("step")
    kept = [row for row in rows[1:] if int(row[step]) <= until_step]
    with atomic_write(path) as temporary:
        text = "".join(_csv_line(row) for row in [COLUMNS, *kept])
        temporary.write_text(text, encoding="utf-8", newline="")


def _cut_jsonl(path: Path, until_step: int) -> None:
    kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= until_step]
    with atomic_write(path) as temporary:
        temporary.write_text("".join(kept), encoding="utf-8")


def _whole_lines(path: Path) -> list[str]:
    """Lines of a file with their ends; a last one without an end was cut off by a crash."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n")]


def _event_writer(directory: Path, until_step: int | None) -> Any:
    writer = _summary_writer()
    if writer is None:
        return None
    return writer(str(directory), purge_step=None if until_step is None else until_step + 1)


def _summary_writer() -> Any:
    """TensorBoard's writer class, or None if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter


def _not_written(error: OSError) -> TrainingError:
    return TrainingError(
        f"cannot write the run's log {error.filename}: {error.strerror}. Free some space, then go"
        " on with --resume"
    )
