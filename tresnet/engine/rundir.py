"""Make, lock and reopen run directories; a new run never uses the directory of another run."""

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from tresnet import writing
from tresnet.engine import config as configs
from tresnet.engine import logs, state
from tresnet.engine.config import AUTO, Resolved, RunConfig, TrainConfig
from tresnet.engine.state import Saved
from tresnet.errors import BusyError, CheckpointError, ConfigError

CONFIG, ENVIRONMENT = "config.json", "environment.json"


def claim(
    config: TrainConfig,
    resume: Path | None,
    stack: contextlib.ExitStack,
    say: Callable[[str], object],
) -> tuple[Path | None, Saved | None]:
    """Find the run to resume, lock its directory and read its state, on process 0 only.

    `resume` is the argument of `train`. `stack` receives the lock. `say` receives a line about a
    damaged state. Returns (directory, state). The directory is None if it must still be made, and
    the state is None for a new run. A run that cannot be resumed raises ConfigError,
    CheckpointError or BusyError.
    """
    if resume is None:
        if config.run.name and os.path.lexists(directory := _named(config.run)):
            raise ConfigError(
                f"--name: the run directory {directory} exists, and a run never overwrites another:"
                f" choose another name, or continue it with --resume {directory}"
            )
        return None, None
    auto = str(resume) == AUTO
    directory = _named(config.run) if auto else resume
    if auto and not os.path.lexists(directory):  # lexists also finds broken symbolic links
        return None, None
    check_directory(directory)
    others = {path.name for path in directory.iterdir()} - {writing.LOCK}
    if auto and others and not others & {CONFIG, state.LAST, state.PREVIOUS}:
        raise ConfigError(f"--name: {directory} exists and is not a run's: choose another name")
    stack.enter_context(writing.lock(directory))
    saved = state.load(directory, say)
    if saved is None and not auto:
        raise CheckpointError(
            f"expected a checkpoint to resume from in {directory}, found none: the run stopped"
            " before its first one, or this is not a run's directory"
        )
    return directory, saved


def check_directory(path: Path) -> None:
    """Raise ConfigError if `path`, the argument of --resume, is not a directory."""
    if not path.is_dir():
        kind = "a file" if path.exists() else "nothing"
        raise ConfigError(f"--resume: expected the directory of a run, got {kind} at {path}")


def create(config: Resolved, stack: contextlib.ExitStack) -> Path:
    """Make a new run's directory, lock it until `stack` closes, and write its configuration."""
    parent, text = Path(config.run.runs), configs.to_json(config)
    with writing.as_write_error(parent):
        parent.mkdir(parents=True, exist_ok=True)
        for directory in [_named(config.run)] if config.run.name else _free_names(config):
            with contextlib.suppress(FileExistsError):  # the directory already exists
                directory.mkdir()  # only one process can succeed
                break
        else:
            raise BusyError(
                f"--name: another process has just begun a run in {_named(config.run)}: wait for"
                " its end, stop it, or choose another name"
            )
    try:
        stack.enter_context(writing.lock(directory))
        writing.write_text(directory / CONFIG, text)
    except BaseException:
        discard(directory)
        raise
    return directory


def reopen(directory: Path, config: Resolved, resumed_from: Path | None) -> None:
    """Remove temporary files, rename the state `resumed_from` to last.pt, write config.json."""
    text = configs.to_json(config)
    writing.remove_leftovers(directory)
    if resumed_from is not None and resumed_from.name == state.PREVIOUS:  # last.pt is damaged
        with writing.as_write_error(resumed_from):
            os.replace(resumed_from, directory / state.LAST)
    writing.write_text(directory / CONFIG, text)


def discard(directory: Path) -> None:
    """Remove the directory of a run that could not begin, so that its name can be used again."""
    own = (CONFIG, ENVIRONMENT, writing.LOCK, logs.TRACKED, logs.TABLE, logs.CSV)
    with contextlib.suppress(OSError):  # keep a directory that holds other files
        for path in directory.iterdir():
            if path.name in own or path.name.startswith(logs.EVENTS):
                path.unlink()
        directory.rmdir()


def add_environment(directory: Path, record: dict[str, Any], *, amend: bool = False) -> None:
    """Append `record`, the environment in which a run starts or resumes, to environment.json.

    With `amend`, the last record there gets the values of `record`.
    """
    path, records = directory / ENVIRONMENT, []
    with contextlib.suppress(OSError, ValueError):  # the file is missing or damaged
        records = json.loads(path.read_text(encoding="utf-8"))
    if amend and records:
        record = records.pop() | record
    writing.write_text(path, json.dumps([*records, record], indent=2) + "\n")


def _named(run: RunConfig) -> Path:
    if not run.name:
        raise ConfigError("--resume auto: expected --name to name the run to begin or continue")
    return Path(run.runs) / run.name


def _free_names(config: Resolved) -> Iterator[Path]:
    data = Path(config.data.data).name.encode(errors="replace").decode()
    stem = f"{config.model}_{data}_{datetime.now():%Y%m%d-%H%M%S}"
    for number in itertools.count(1):
        yield Path(config.run.runs, stem if number == 1 else f"{stem}-{number}")
