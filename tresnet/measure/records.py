"""Records: one JSON file per measurement, with everything needed to repeat and to doubt it."""

import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path, PureWindowsPath
from typing import Any

import torch

from tresnet import env
from tresnet.errors import InputError
from tresnet.files import atomic_write

# Of the keys and their meaning; `tresnet.measure.report` refuses what it does not know.
FORMAT = 2


class RecordFile:
    """One record, `<what>_<device>_torch<version>_<date>.json`, written as often as there is news.

    The name is taken at the first `write`; an existing record is never touched: a taken name gets a
    counter, `..._2.json`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        what: str,
        *,
        device: torch.device | str | None,
        settings: Mapping[str, Any],
        warmup_steps: int = 0,
        runs: int = 1,
        argv: Sequence[str] | None = None,
    ) -> None:
        """Keep what to write.

        Args:
            directory: where records live; made at the first `write` if missing.
            what: kind of measurement, for example `bench_train`.
            device: what is measured on; None means the CPU.
            settings: the options all rows share, as plain values.
            warmup_steps: steps run before anything is timed.
            runs: timed steps (or repeats) behind each row's percentiles.
            argv: the command line; None for this process's. Absolute paths lose their directories.

        Raises:
            InputError: the directory cannot be written.
        """
        check_directory(directory)
        self.path: Path | None = None
        self._directory, self._device = Path(directory), device
        self._head: dict[str, Any] = {
            "format": FORMAT,
            "what": what,
            "command": public_command(sys.argv if argv is None else argv),
        }
        self._rest = {"settings": dict(settings), "warmup_steps": warmup_steps, "runs": runs}

    def write(self, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Write the whole record, over what this object wrote before.

        Args:
            rows: the results, as plain values; None for what was not measured.

        Raises:
            InputError: there are no rows, or the directory cannot be written.
            ValueError: a value is NaN or infinite, which JSON cannot hold.
        """
        if not rows:
            raise InputError(
                "expected something measured to record, got nothing: allow more time or ask for more"
            )
        if "environment" not in self._head:
            self._head["environment"] = env.describe(self._device)
        content = {**self._head, **self._rest, "rows": [dict(row) for row in rows]}
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        try:
            if self.path is None:
                self._directory.mkdir(parents=True, exist_ok=True)
                stem = _stem(self._head["what"], self._head["environment"]["device"])
                path = _reserve(self._directory, stem)
                _fill(path, text)
                self.path = path
            else:
                with atomic_write(self.path) as temporary:
                    temporary.write_text(text, encoding="utf-8")
        except OSError as error:
            raise _unwritable(self._directory, error) from error
        return self.path


def write_record(
    directory: str | os.PathLike[str], what: str, *, rows: Sequence[Mapping[str, Any]], **about: Any
) -> Path:
    """Write a record once; `about` is what `RecordFile` takes."""
    return RecordFile(directory, what, **about).write(rows)


def write_new(path: Path, text: str) -> None:
    """Write a file that is not there yet, whole or not at all, and make its directory if missing.

    Raises:
        InputError: it is there, or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    try:
        path.touch(exist_ok=False)
        _fill(path, text)
    except FileExistsError as error:
        raise InputError(f"expected a new file to write, but {path} exists: remove it") from error
    except OSError as error:
        raise _unwritable(path.parent, error) from error


def _fill(path: Path, text: str) -> None:
    """Write the file whose empty predecessor holds its name; remove that if it fails."""
    try:
        with atomic_write(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def check_directory(directory: str | os.PathLike[str]) -> None:
    """Check that records can be written to `directory`, which need not exist yet; leaves nothing.

    A long measurement shall not end in nothing, nor one that never began leave an empty directory.

    Raises:
        InputError: it cannot be made or written.
    """
    try:
        with tempfile.TemporaryFile(dir=_nearest(Path(directory))):  # permissions do not tell all
            pass
    except OSError as error:
        raise _unwritable(directory, error) from error


def _nearest(folder: Path) -> Path:
    """The folder itself if something is there, a broken link say, else the nearest one above."""
    try:
        folder.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return folder if folder == folder.parent else _nearest(folder.parent)
    return folder


def _unwritable(directory: str | os.PathLike[str], reason: object) -> InputError:
    return InputError(
        f"expected a directory that records can be written to, got {os.fspath(directory)} "
        f"({reason}): choose another or free some space"
    )


def public_command(argv: Sequence[str]) -> str:
    """The command line with each absolute path cut to its last part.

    >>> public_command(["/opt/env/bin/tresnet", "bench", "--output-dir=/tmp/records"])
    'tresnet bench --output-dir=records'
    """
    return " ".join(_public_argument(argument) for argument in argv)


def _public_argument(argument: str) -> str:
    option, equals, value = argument.rpartition("=")
    path = PureWindowsPath(value)  # understands both slashes and drive letters
    absolute = path.is_absolute() or value.startswith(("/", "~", "\\"))
    return f"{option}{equals}{path.name if absolute else value}"


def _stem(what: str, device: Mapping[str, Any]) -> str:
    name = str(device.get("name") or device["type"]).lower().removeprefix("nvidia ")
    slug = re.sub(r"[^a-z0-9]+", "-", name).strip("-")
    version = torch.__version__.partition("+")[0]
    return f"{what}_{slug}_torch{version}_{datetime.now(UTC):%Y-%m-%d}"


def _reserve(folder: Path, stem: str) -> Path:
    """Create the first free of `stem.json`, `stem_2.json`, ... empty, so that no one takes it."""
    counter = 1
    while True:
        path = folder / (f"{stem}.json" if counter == 1 else f"{stem}_{counter}.json")
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            counter += 1
        else:
            return path
