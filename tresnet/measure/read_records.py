"""Records read back: checked, and named in whatever is wrong with them."""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

from tresnet.errors import InputError
from tresnet.measure.records import FORMAT

_TEXT = str | NoneType
_NUMBER = int | float | NoneType
_CASE: dict[str, type | UnionType] = {
    "model": str,
    "batch_size": int,
    "input_size": int | NoneType,
    "dtype": str,
    "cast": _TEXT,
    "channels_last": bool,
    "compile": str,
    "norm": _TEXT,
    "fold": bool,
    "freeze": bool,
    "status": str,
    "error": _TEXT,
}
_STEP = {
    **_CASE,
    "p50_images_per_s": _NUMBER,
    "round_p50_images_per_s": list,
    "max_allocated_mib": _NUMBER,
    "rss_peak_mib": _NUMBER,
}
# What the rows of each kind of record must hold; kinds that are not here are not drawn.
COLUMNS: dict[str, dict[str, type | UnionType]] = {
    "bench_train": _STEP,
    "bench_infer": _STEP,
    "bench_max_batch": {
        **_CASE,
        "largest_batch": int | NoneType,
        "limited_by": _TEXT,
        "memory_limit_mib": _NUMBER,
    },
    "bench_ops": {
        "op": str,
        "place": str,
        "shape": list,
        "dtype": str,
        "direction": str,
        "contender": str,
        "status": str,
        "note": _TEXT,
        "p50_us": _NUMBER,
        "gb_per_s": _NUMBER,
        "share_of_copy": _NUMBER,
    },
}


# Settings of a case that older records do not have.
_LATER_COLUMNS: dict[str, type | UnionType] = {
    "impl": _TEXT,
    "partitioner": _TEXT,
    "pad": bool,
    "recompute": _TEXT,
    "input": str,
}
_LISTS = {"round_p50_images_per_s", "shape"}
# What a row that is `ok` has found.
_FIGURES = {
    "bench_train": "p50_images_per_s",
    "bench_infer": "p50_images_per_s",
    "bench_max_batch": "largest_batch",
}
_HUGE = 2**63
_SOUND = "above 0 and below 2**63"
_NAMED_FAULTS = 3
_QUOTED = 200


@dataclasses.dataclass(frozen=True)
class Record:
    """One record.

    Attributes:
        name: of the file.
        what: kind of measurement.
        command: the command line that wrote it.
        date_utc: when, to the second.
        device: GPU with its power limit, or CPU with the threads used: figures of two devices are
            never comparable.
        on_gpu: whether it is a GPU.
        torch: version of PyTorch.
        settings: what all rows share.
        rows: the results.
    """

    name: str
    what: str
    command: str
    date_utc: str
    device: str
    on_gpu: bool
    torch: str
    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]


def read_records(
    folder: str | os.PathLike[str], passed_over: Callable[[InputError], object] | None = None
) -> list[Record]:
    """Every record of a folder, oldest first.

    Args:
        folder: where they are.
        passed_over: told of each file that is no sound record (a killed process leaves an empty one),
            which is then left out; None to raise it.

    Raises:
        InputError: no folder or no record in it, or a file that is damaged, of another format, or no
            record at all, where none may be left out or no other is there.
    """
    directory = Path(folder)
    if not directory.is_dir():
        raise InputError(f"expected a folder of records, got {directory}: tresnet bench writes one")
    paths = sorted(path for path in directory.glob("*.json") if not path.is_fifo())
    if not paths:
        raise InputError(f"expected records (*.json) in {directory}, found none: measure first")
    records, faults = [], []
    for path in paths:
        try:
            records.append(read_record(path))
        except InputError as error:
            if passed_over is None:
                raise
            faults.append(error)
    if not records:
        raise InputError(
            f"expected records in {directory}, but none can be read: "
            + "; ".join(map(str, faults[:_NAMED_FAULTS]))
            + (f"; and {len(faults) - _NAMED_FAULTS} more" * (len(faults) > _NAMED_FAULTS))
        )
    for error in faults:
        assert passed_over is not None, "raised otherwise"
        passed_over(error)
    return sorted(records, key=lambda one: (one.date_utc, one.name))


def read_record(path: str | os.PathLike[str]) -> Record:
    """One record.

    Raises:
        InputError: the file is unreadable, damaged, or of a format this version does not know.
    """
    file = _File(Path(path))
    content = file.content()
    version = content.get("format", 1)
    if version != FORMAT:
        raise file.wrong(f"format {FORMAT}", f"format {version!r}: read it with a newer tresnet")
    environment = file.take(content, "environment", dict)
    what = file.take(content, "what", str)
    rows = file.take(content, "rows", list)
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise file.wrong("rows of columns", f"row {number} = {row!r}")
        _check_row(file, what, row, f"row {number}: ")
    packages = file.take(environment, "packages", dict, "environment: ")
    device, on_gpu = _device(file, environment)
    return Record(
        name=file.path.name,
        what=what,
        command=file.take(content, "command", str),
        date_utc=_date(file, environment),
        device=device,
        on_gpu=on_gpu,
        torch=file.take(packages, "torch", str),
        settings=file.take(content, "settings", dict),
        rows=rows,
    )


def _check_row(file: "_File", what: str, row: Mapping[str, Any], where: str) -> None:
    columns = COLUMNS.get(what, {})
    for column, kind in columns.items():
        file.take(row, column, kind, where)
    for column, kind in _LATER_COLUMNS.items() if columns else ():
        if column in row:
            file.take(row, column, kind, where)
    for column in _LISTS & columns.keys():
        for value in row[column]:
            if type(value) not in (int, float):
                raise file.wrong(f"{where}{column} of numbers", repr(row[column]))
            if not _is_sound(value):
                raise file.wrong(f"{where}{column} {_SOUND}", repr(row[column]))
    figure = _FIGURES.get(what)
    if figure is not None and row["status"] == "ok" and row[figure] is None:
        raise file.wrong(f"{where}{figure} above 0 where status is ok", "null")


def _is_sound(number: float) -> bool:
    """Whether it is above 0, as all numbers in records are, and can be computed with."""
    return 0 < number < _HUGE


class _File:
    """A file whose faults are told with its name."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def wrong(self, expected: str, got: str) -> InputError:
        short = got if len(got) <= _QUOTED else f"{got[:_QUOTED]}..."
        return InputError(f"{self.path}: expected {expected}, got {short}")

    def content(self) -> dict[str, Any]:
        try:
            text = self.path.read_text(encoding="utf-8")
            if not text.strip():
                raise self.wrong("a record", "an empty file: remove it")
            content = json.loads(text)
        except InputError:
            raise
        except (OSError, UnicodeDecodeError) as error:
            raise self.wrong("a record", f"a file that cannot be read ({error})") from error
        except (ValueError, RecursionError) as error:  # a number of 5000 digits is a ValueError
            raise self.wrong("a record in JSON", f"something else ({error})") from error
        if not isinstance(content, dict):
            raise self.wrong("a record", type(content).__name__)
        return content

    def take(
        self, values: Mapping[str, Any], key: str, kind: type | UnionType, where: str = ""
    ) -> Any:
        """`values[key]`, which must be of a kind."""
        if key not in values:
            raise self.wrong(f"{where}{key}", f"only {', '.join(values) or 'nothing'}")
        value = values[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            name = getattr(kind, "__name__", str(kind))
            raise self.wrong(f"{where}{key} of type {name}", repr(value))
        if type(value) in (int, float) and not _is_sound(value):
            raise self.wrong(f"{where}{key} {_SOUND}", repr(value))
        return value


def _date(file: _File, environment: Mapping[str, Any]) -> str:
    text = file.take(environment, "date_utc", str, "environment: ")
    try:
        datetime.fromisoformat(text)
    except ValueError as error:
        raise file.wrong("environment: date_utc such as 2026-01-31T12:00:00", text) from error
    return text


def _device(file: _File, environment: Mapping[str, Any]) -> tuple[str, bool]:
    """The device in words, and whether it is a GPU."""
    device = file.take(environment, "device", dict, "environment: ")
    kind = file.take(device, "type", str, "device: ")
    if kind == "cuda":
        name = file.take(device, "name", str, "device: ")
        has_limit = "power_limit_w" in device
        limit_w = file.take(device, "power_limit_w", _NUMBER, "device: ") if has_limit else None
        return (name if limit_w is None else f"{name} at {limit_w:.0f} W"), True
    cpu = file.take(environment, "cpu", dict, "environment: ")
    threads = file.take(cpu, "torch_threads", int, "cpu: ")
    model = (
        file.take(cpu, "model", _TEXT, "cpu: ") if "model" in cpu else None
    ) or "of unknown model"
    return f"{kind.upper()}: {model}, {threads} thread{'s' if threads > 1 else ''}", False
