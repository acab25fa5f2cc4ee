"""Run directories: a new one never touches another run's."""

import datetime
import json
import os
from pathlib import Path
from typing import Any

from tresnet.engine import config as configs
from tresnet.engine.config import TrainConfig
from tresnet.errors import ConfigError
from tresnet.files import atomic_write

CONFIG, ENVIRONMENT = "config.json", "environment.json"


def create(config: TrainConfig, now: datetime.datetime) -> Path:
    """Make the directory of a new run and write its configuration into it.

    Args:
        config: A resolved configuration.
        now: Part of an automatic name.

    Raises:
        ConfigError: The named directory exists, or none can be made there.
    """
    parent = Path(config.run.runs)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        directory = (
            _named(parent, config.run.name) if config.run.name else _new(parent, config, now)
        )
        with atomic_write(directory / CONFIG) as temporary:
            temporary.write_text(configs.to_json(config), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot make a run directory in {parent}: {error}") from error
    return directory


def add_environment(directory: Path, record: dict[str, Any]) -> None:
    """Append what the process that starts or resumes the run computes with.

    Raises:
        ConfigError: It cannot be written.
    """
    path = directory / ENVIRONMENT
    try:
        records = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        with atomic_write(path) as temporary:
            text = json.dumps([*records, record], indent=2) + "\n"
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def _named(parent: Path, name: str) -> Path:
    if os.path.basename(name) != name or name in (".", ".."):
        raise ConfigError(f"--name: expected a directory name without a path, got {name!r}")
    directory = parent / name
    try:
        directory.mkdir()
    except FileExistsError as error:
        raise ConfigError(
            f"--name: the run directory {directory} exists, and a run never overwrites another:"
            f" choose another name, or go on with it by --resume {directory}"
        ) from error
    return directory


def _new(parent: Path, config: TrainConfig, now: datetime.datetime) -> Path:
    data = Path(config.data.data or "").name
    stem = f"{config.model.model}_{data}_{now:%Y%m%d-%H%M%S}"
    number = 1
    while True:
        directory = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            directory.mkdir()
        except FileExistsError:
            number += 1
        else:
            return directory
