"""Records of measurements: JSON files with the command, settings, environment and results."""

import contextlib
import itertools
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

from tresnet import environment
from tresnet.errors import InputError
from tresnet.process import command_line
from tresnet.writing import as_write_error, write_text

# Version of a record's format, increased when a key or its meaning changes. Up to version 2,
# `max_allocated_mib` of a row with `replayed` true omits the memory of the CUDA graph. Up to
# version 3, `settings` of `tresnet bench` has models' settings too, which are in the rows.
FORMAT = 4


class RecordFile:
    """Record of a measurement: the file `<what>_<device>_torch<version>_<date>.json`.

    The first `write` creates the file; if the name is taken, the name gets a counter, `..._2.json`.
    `settings` are JSON values that apply to all rows. `runs` is the number of measured steps or
    rounds. The record has `argv` (default: the command line of `tresnet` or of this process) with
    absolute paths reduced to names.
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
        check_directory(directory)  # fails before a long measurement, not after
        self.path: Path | None = None
        self._directory, self._device = Path(directory), device
        self._head: dict[str, Any] = {
            "format": FORMAT,
            "what": what,
            "command": public_command(argv or command_line.get() or sys.argv),
            "environment": None,
            "settings": dict(settings),
            "warmup_steps": warmup_steps,
            "runs": runs,
        }

    def write(self, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Write the record with `rows`, which replace the rows of an earlier call."""
        self._head["environment"] = self._head["environment"] or environment.describe(self._device)
        content = {**self._head, "rows": [dict(row) for row in rows]}
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        path = self.path or self._reserve()
        try:
            write_text(path, text)
        except BaseException:
            if self.path is None:
                path.unlink(missing_ok=True)
            raise
        self.path = path
        return path

    def _reserve(self) -> Path:
        """Create an empty file `stem.json`; if that name is taken, use `stem_2.json`, and so on."""
        device = self._head["environment"]["device"]
        name = str(device.get("name") or device["type"]).lower().removeprefix("nvidia ")
        slug = re.sub(r"[^a-z0-9]+", "-", name).strip("-")
        version = torch.__version__.partition("+")[0]
        stem = f"{self._head['what']}_{slug}_torch{version}_{datetime.now(UTC):%Y-%m-%d}"
        names = (f"{stem}_{counter}.json" for counter in itertools.count(2))
        with as_write_error(self._directory):
            for path in map(self._directory.joinpath, itertools.chain([f"{stem}.json"], names)):
                with contextlib.suppress(FileExistsError):
                    path.touch(exist_ok=False)  # another process may choose the same name
                    return path
        raise AssertionError("counters have no end")


def check_directory(directory: str | os.PathLike[str]) -> None:
    """Create `directory`; raise InputError unless records can be written to it."""
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):  # permissions do not prove that writing works
            pass
    except OSError as error:
        raise InputError(
            f"expected a directory that records can be written to, got {os.fspath(directory)} "
            f"({error}): choose another or free some space"
        ) from error


def public_command(argv: Sequence[str]) -> str:
    """Return the command line, in which absolute paths are reduced to their last names.

    >>> public_command(["/opt/env/bin/tresnet", "bench", "--output-dir=/tmp/records"])
    'tresnet bench --output-dir=records'
    """
    public = []
    for argument in argv:
        option, equals, value = argument.rpartition("=")
        path = PureWindowsPath(value)  # parses slashes, backslashes and drive letters
        absolute = path.is_absolute() or value.startswith(("/", "~", "\\"))
        public.append(f"{option}{equals}{path.name if absolute else value}")
    return " ".join(public)
