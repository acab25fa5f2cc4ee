"""Writes files whole or not at all."""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path beside `path`, which becomes `path` when the block succeeds.

    Whatever fails in the block (a full disk, an exception, Ctrl-C) removes the temporary file and
    leaves the old `path` as it was. On success the data reach the disk before the name does, so a
    crash leaves the old file or the new one. The caller creates the temporary file itself, with
    `open` or a library, so its permissions follow the umask. A symbolic link is written through.

    Args:
        path: The file to write; its directory must exist.

    Yields:
        A path in the same directory that does not exist yet.

    Raises:
        OSError: The directory is missing, `path` is a directory, or writing failed.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(
            errno.EISDIR, "expected a file to write, got a directory", str(path)
        )
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the directory does not exist", str(target.parent))
    # cut to stay within the 255 bytes that file systems allow for a name
    temporary = target.parent / f".{target.name[:48]}.{secrets.token_hex(8)}.tmp"
    try:
        yield temporary
        _fsync(temporary)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    with contextlib.suppress(OSError):  # some file systems cannot fsync a directory
        _fsync(target.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
