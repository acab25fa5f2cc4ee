"""Errors that users can cause. Each message says what was expected, what came and what to do.

Commands print the message of a `TResNetError` on stderr and exit with code 2. Callers of the
library catch `TResNetError`, or the built-in base of a subclass, such as `ValueError`.
"""

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class TResNetError(Exception):
    """Base class of all errors that this package raises on purpose."""


class InputError(TResNetError, ValueError):
    """An argument is an unknown name, has a wrong shape or dtype, or is out of range."""


class ConfigError(TResNetError, ValueError):
    """Settings contradict each other or the machine, or differ from those of a resumed run."""


class CheckpointError(TResNetError, RuntimeError):
    """A file of weights is missing, damaged or unsafe, or belongs to another model."""


class ExportError(TResNetError, RuntimeError):
    """Outputs of an exported file differ from the model's, or are not finite."""


class OutputError(TResNetError, ArithmeticError):
    """Outputs of a model are not finite, so that they predict nothing."""


class DataError(TResNetError, ValueError):
    """A data set is empty or incomplete, or holds files that are not images."""


class MissingDependencyError(TResNetError, ImportError):
    """An optional package is not installed; the message gives the command that installs it."""


class TrainingError(TResNetError, RuntimeError):
    """Training cannot continue, for example because the loss is not finite."""


class WriteError(TResNetError, OSError):
    """A file cannot be written, for example because the disk is full or a permission is missing."""


class BusyError(TResNetError, RuntimeError):
    """Another process has locked a directory that this process needs."""


@contextlib.contextmanager
def needed(what: str, extra: str) -> Iterator[None]:
    """Turn an ImportError in the block into an error that says how to install `tresnet[extra]`."""
    try:
        yield
    except ImportError as error:
        package = (error.name or str(error)).partition(".")[0]
        raise MissingDependencyError(to_install(what, package, extra)) from error


def to_install(what: str, package: str, extra: str) -> str:
    """Return the message that `what` needs `package`, with pip's command for `tresnet[extra]`."""
    return (
        f"{what} needs {package}, not installed: pip install 'tresnet[{extra}]' (from a clone: "
        f"pip install -e '.[{extra}]')"
    )


def listed(names: Iterable[object], limit: int = 20) -> str:
    """Return the first `limit` names in one string, with the number of names left out."""
    texts = list(map(str, names))
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return (", ".join(texts[:limit]) or "none") + more


def unknown(kind: str, name: object, valid_names: Iterable[str]) -> str:
    """Return `unknown KIND 'NAME': HINT`; the hint is a similar valid name or the valid names.

    Of more than twelve valid names, the twelve most similar ones are listed.
    """
    names, given = sorted(valid_names), str(name).lower()
    near = difflib.get_close_matches(given, names, n=1)
    if not near and len(names) > 12:
        names = difflib.get_close_matches(given, names, len(names), cutoff=0)
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of {listed(names, 12)}"
    return f"unknown {kind} {name!r:.80}: {hint}"


def check_known(
    kind: str, name: object, valid_names: Iterable[str], error: type[TResNetError] = InputError
) -> None:
    """Raise `error`, with the message that `unknown` returns, unless `name` is in `valid_names`."""
    names = list(valid_names)
    if not isinstance(name, str) or name not in names:
        raise error(unknown(kind, name, names))
