"""Fetches published files and checks that they are what was published."""

import hashlib
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path

from tresnet.errors import CheckpointError
from tresnet.files import atomic_write

_TIMEOUT_S = 60.0
_CHUNK_BYTES = 2**20
_SHA256 = re.compile(r"[0-9a-f]{64}")


def from_hub(repo_id: str, filename: str) -> Path:
    """Return a file of a Hugging Face repository, out of the hub's cache or downloaded into it.

    Raises:
        OSError, ValueError: it is neither cached nor can it be downloaded.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(repo_id, filename, local_files_only=True))
    except EntryNotFoundError:  # not cached
        return Path(hf_hub_download(repo_id, filename))


def hub_sha256(path: Path) -> str | None:
    """Return the hash the hub gave a cached large file: the cache names its blob by it."""
    if not path.is_symlink():  # a cache on a file system without links
        return None
    name = Path(os.readlink(path)).name
    return name if _SHA256.fullmatch(name) else None


def from_url(url: str, path: Path) -> Path:
    """Download `url` to `path` unless it is there; whole or not at all.

    Raises:
        OSError: the download failed or ended early.
    """
    from urllib.request import urlopen

    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with urlopen(url, timeout=_TIMEOUT_S) as response, atomic_write(path) as temporary:
        scheme = response.geturl().partition(":")[0]
        if scheme != url.partition(":")[0]:
            raise OSError(f"redirected to {scheme}")
        length = response.headers.get("Content-Length")
        with temporary.open("wb") as stream:
            received = _copy(response.read, stream.write)
        if length is not None and received != int(length):
            raise OSError(f"got {received} of {length} bytes")
    return path


def _copy(read: Callable[[int], bytes], write: Callable[[bytes], object]) -> int:
    received = 0
    while chunk := read(_CHUNK_BYTES):
        write(chunk)
        received += len(chunk)
    return received


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's contents, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def verify(path: Path, expected: str | None, tag: str) -> None:
    """Check a file's hash; warn where none is known.

    Raises:
        CheckpointError: the hash is another.
    """
    if expected is None:
        warnings.warn(
            f"{tag}: no published hash to check {path} against; its sha256 is {sha256(path)}",
            stacklevel=2,
        )
        return
    found = sha256(path)
    if found != expected:
        raise CheckpointError(
            f"{path} is not the published {tag}: expected sha256 {expected}, got {found}. It is "
            "damaged or was replaced: delete it and try again"
        )
