"""Write files and directories whole or not at all, and lock directories."""

import contextlib
import errno
import logging
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tresnet.errors import BusyError, WriteError

LOCK = ".lock"
PATIENCE_S = 1.0  # wait for a lock, because the lock of a killed process may last for a moment
_TEMPORARY = re.compile(r"\..{1,48}\.[0-9a-f]{16}\.tmp")
# Advice for failed writes. Keys are error numbers that reading a file cannot cause.
_ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "see ulimit -f",
    errno.EROFS: "choose another place",
}
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def atomic_write(
    path: str | os.PathLike[str], *, former: str | os.PathLike[str] | None = None
) -> Iterator[Path]:
    """Yield a temporary file beside `path`. If the block succeeds, that file replaces `path`.

    The old file is renamed to `former`, unless this is None.

    If the block fails, the old file stays. The new file is synced before the rename, so a crash
    leaves the old file or the new file. Permissions follow the umask. If `path` is a symbolic link,
    the link's target is replaced. WriteError: `path` cannot be written, or the disk is full.
    """
    target = check_target(path)
    # The name is shortened, because file systems allow only 255 bytes for a name.
    name = os.fsdecode(os.fsencode(target.name)[:48])
    temporary = target.parent / f".{name}.{secrets.token_hex(8)}.tmp"
    try:
        with as_write_error(path):
            temporary.touch(exist_ok=False)
            mode = stat.S_IMODE(temporary.stat().st_mode)
        try:
            yield temporary
        except Exception as error:
            if reason := _reason(error):
                raise WriteError(f"cannot write {path}: {reason}") from error
            raise
        with as_write_error(path):
            temporary.chmod(mode)
            _fsync(temporary)
        if former is not None and target.exists():
            with as_write_error(former):
                os.replace(target, former)  # after the sync, which may take seconds
        with as_write_error(path):
            os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    with contextlib.suppress(OSError):  # some file systems cannot fsync a directory
        _fsync(target.parent)


def check_target(path: str | os.PathLike[str]) -> Path:
    """Return `path` without symbolic links; a directory or missing parent raises WriteError."""
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise WriteError(f"cannot write {path}: expected a file, got a directory")
    if not target.parent.is_dir():
        raise WriteError(f"cannot write {path}: the directory {target.parent} does not exist")
    return target


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a new temporary directory, which is renamed to `path` when the block succeeds.

    If the block fails, the directory is removed. WriteError: `path` has contents or is unwritable.
    """
    with as_write_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent)
    with scratch:
        temporary = Path(scratch.name) / path.name
        temporary.mkdir()
        yield temporary
        with as_write_error(path):
            temporary.rename(path)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in UTF-8 through `atomic_write`, which may raise WriteError."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


@contextlib.contextmanager
def as_write_error(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an OSError in the block into a WriteError; the block must use no file but `path`."""
    try:
        yield
    except OSError as error:
        raise WriteError(f"cannot write {path}: {_reason(error) or error.strerror}") from error


def remove_leftovers(directory: Path) -> None:
    """Remove temporary files of killed processes; call it when no process writes to `directory`."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if _TEMPORARY.fullmatch(path.name):
                path.unlink()


@contextlib.contextmanager
def lock(directory: Path) -> Iterator[None]:
    """Lock a directory while the block runs; raise BusyError if another process has the lock.

    The operating system releases the lock when the process ends, even if its children go on. A file
    system without locks causes only a warning. A read-only directory raises WriteError.
    """
    from filelock import FileLock, Timeout

    path = directory / LOCK
    with as_write_error(path):
        path.touch()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(FileLock(path, timeout=PATIENCE_S))
        except Timeout as error:
            pid = path.read_text(encoding="utf-8").strip() or "?"
            raise BusyError(
                f"expected {directory} to be free, but process {pid} is at work in it: wait for"
                " its end, or stop it"
            ) from error
        except OSError as error:
            _log.warning("%s cannot be locked (%s): start no second run in it", directory, error)
        with contextlib.suppress(OSError):  # the lock works without the process ID too
            path.write_text(str(os.getpid()), encoding="utf-8")
        yield


def _reason(error: BaseException | None) -> str | None:
    """Return the system's reason and our advice if a failed write caused `error`, else None."""
    while error is not None:
        code = error.errno if isinstance(error, OSError) else None
        # safetensors states the error number only in its error's message
        if spelled := re.search(r"\(os error (\d+)\)", str(error)):
            code = int(spelled[1])
        if code in _ADVICE:
            return f"{os.strerror(code)}: {_ADVICE[code]}"
        error = error.__cause__ or error.__context__  # torch.save wraps an OSError
    return None


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
