"""Records read back: checked, and named in whatever is wrong with them."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, cast

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
        "ideal_bytes": int,
        "p50_us": _NUMBER,
        "gb_per_s": _NUMBER,
        "share_of_copy": _NUMBER,
    },
}


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


def read_records(folder: str | os.PathLike[str]) -> list[Record]:
    """Every record of a folder, oldest first.

    Raises:
        InputError: no folder or no record in it, or a record that is damaged or of another format.
    """
    directory = Path(folder)
    if not directory.is_dir():
        raise InputError(f"expected a folder of records, got {directory}: tresnet bench writes one")
    paths = sorted(directory.glob("*.json"))
    if not paths:
        raise InputError(f"expected records (*.json) in {directory}, found none: measure first")
    return sorted((read_record(path) for path in paths), key=lambda one: (one.date_utc, one.name))


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
        for column, kind in COLUMNS.get(what, {}).items():
            value = file.take(row, column, kind, f"row {number}: ")
            if column == "round_p50_images_per_s" and not all(
                type(v) in (int, float) for v in value
            ):
                raise file.wrong(f"row {number}: {column} of numbers", repr(value))
    device = file.take(environment, "device", dict)
    kind = file.take(device, "type", str)
    packages = file.take(environment, "packages", dict)
    return Record(
        name=file.path.name,
        what=what,
        command=file.take(content, "command", str),
        date_utc=file.take(environment, "date_utc", str),
        device=_gpu(device) if kind == "cuda" else _cpu(file, kind, environment),
        on_gpu=kind == "cuda",
        torch=file.take(packages, "torch", str),
        settings=file.take(content, "settings", dict),
        rows=rows,
    )


class _File:
    """A file whose faults are told with its name."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def wrong(self, expected: str, got: str) -> InputError:
        return InputError(f"{self.path}: expected {expected}, got {got}")

    def content(self) -> dict[str, Any]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise self.wrong("a record", f"a file that cannot be read ({error})") from error
        except (json.JSONDecodeError, RecursionError) as error:
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
        return value


def _gpu(device: Mapping[str, Any]) -> str:
    limit_w = cast("float | None", device.get("power_limit_w"))
    name = device.get("name") or "GPU of unknown name"
    return name if limit_w is None else f"{name} at {limit_w:.0f} W"


def _cpu(file: _File, kind: str, environment: Mapping[str, Any]) -> str:
    cpu = file.take(environment, "cpu", dict)
    threads = file.take(cpu, "torch_threads", int)
    model = cpu.get("model") or "of unknown model"
    return f"{kind.upper()}: {model}, {threads} thread{'s' if threads > 1 else ''}"
