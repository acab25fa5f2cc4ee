"""Errors that a user can cause. Each message names what was expected, what came and what to do.

Commands print such an error as one line on stderr and exit with code 2. Callers of the library
catch `TResNetError`, or its built-in base class (`ValueError`, `RuntimeError`, `ImportError`).
"""

import contextlib
from collections.abc import Iterator


class TResNetError(Exception):
    """Base class of every error this package raises on purpose."""


class InputError(TResNetError, ValueError):
    """An argument has a wrong name, shape, dtype or range."""


class ConfigError(TResNetError, ValueError):
    """A configuration contradicts itself, the resumed run, or the machine."""


class CheckpointError(TResNetError, RuntimeError):
    """A file of weights is damaged, unsafe, or belongs to another model."""


class ExportError(TResNetError, RuntimeError):
    """An exported file computes other results than the model, so the file was removed."""


class DataError(TResNetError, ValueError):
    """A data set is empty, incomplete or holds files that are not images."""


class MissingDependencyError(TResNetError, ImportError):
    """An optional package is not installed; the message gives the command that installs it."""


class TrainingError(TResNetError, RuntimeError):
    """Training cannot continue, for example because the loss is not finite."""


class WriteError(TResNetError, OSError):
    """A file cannot be written: no space, no permission, or no such directory."""


class BusyError(TResNetError, RuntimeError):
    """Another process is using a directory."""


@contextlib.contextmanager
def needed(what: str, extra: str) -> Iterator[None]:
    """Turn a failed import in the block into a MissingDependencyError that names `extra`."""
    try:
        yield
    except ImportError as error:
        package = (error.name or str(error)).partition(".")[0]
        raise MissingDependencyError(to_install(what, package, extra)) from error


def to_install(what: str, package: str, extra: str) -> str:
    """Return a message with the missing packages of `what`, and the command to install them."""
    return (
        f"{what} needs {package}, not installed: pip install 'tresnet[{extra}]' (from a clone: "
        f"pip install -e '.[{extra}]')"
    )
