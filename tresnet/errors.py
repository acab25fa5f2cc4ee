"""The errors a user can cause. Each message says what was expected, what came and what to do.

Command lines turn any of them into one line on stderr and exit code 2; as a library, catch
`TResNetError` or the built-in class that fits (`ValueError`, `RuntimeError`, `ImportError`).
"""

import contextlib
from collections.abc import Iterator


class TResNetError(Exception):
    """Base class of every error this package raises on purpose."""


class InputError(TResNetError, ValueError):
    """An argument or a tensor does not fit: a name, shape, dtype or range."""


class ConfigError(TResNetError, ValueError):
    """A configuration contradicts itself, the run it resumes, or the machine."""


class CheckpointError(TResNetError, RuntimeError):
    """A file of weights is damaged, unsafe, or belongs to another model."""


class ExportError(TResNetError, RuntimeError):
    """An exported file does not compute what the model does; it was removed."""


class DataError(TResNetError, ValueError):
    """A data set is empty, incomplete or holds files that are not images."""


class MissingDependencyError(TResNetError, ImportError):
    """An optional package is not installed; the message gives the command that installs it."""


class TrainingError(TResNetError, RuntimeError):
    """Training cannot go on, for example because the loss is no longer finite."""


class WriteError(TResNetError, OSError):
    """A file cannot be written: no space, no permission, or no such directory."""


class BusyError(TResNetError, RuntimeError):
    """Another process is at work in a directory."""


@contextlib.contextmanager
def needed(what: str, extra: str) -> Iterator[None]:
    """Turn a failed import inside into MissingDependencyError with the command for `extra`."""
    try:
        yield
    except ImportError as error:
        package = (error.name or str(error)).partition(".")[0]
        raise MissingDependencyError(to_install(what, package, extra)) from error


def to_install(what: str, package: str, extra: str) -> str:
    """Return a message with the packages that `what` needs, and the command that installs them."""
    return (
        f"{what} needs {package}, not installed: pip install 'tresnet[{extra}]' (from a clone: "
        f"pip install -e '.[{extra}]')"
    )
