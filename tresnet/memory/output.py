"""Files that a prediction is drawn into: refused before the work, written whole or not at all."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tresnet.errors import InputError
from tresnet.files import atomic_write


def check_path(path: str | Path, suffixes: Sequence[str]) -> Path:
    """The path, if a file of that kind can be written there.

    Raises:
        InputError: another suffix, a folder that is not there, or no permission to write.
    """
    path = Path(path)
    if path.suffix.lower() not in suffixes:
        raise InputError(f"expected a path ending in {', '.join(suffixes)}, got {path.name!r}")
    if not path.parent.is_dir():
        raise InputError(f"expected an existing folder, got {path.parent}: create it first")
    if path.is_dir():
        raise InputError(f"expected a file to write, got the folder {path}: name a file in it")
    # A file is replaced as a whole, which takes the right to write into its folder.
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InputError(
            f"expected a folder that can be written to, got {path.parent}: choose another"
        )
    return path


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that becomes `path` when the block succeeds.

    Raises:
        InputError: it cannot be written; what was there before stays.
    """
    try:
        with atomic_write(path) as temporary:
            yield temporary
    except OSError as error:
        raise InputError(f"cannot write {path} ({error}): choose another place") from error
