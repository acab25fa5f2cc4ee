"""Fetches published files and checks that they are what was published."""

import hashlib
import logging
import os
import re
import shutil
import warnings
from pathlib import Path

from tresnet.checkpoints.published import WeightsEntry, find, weights_dir
from tresnet.errors import CheckpointError
from tresnet.files import atomic_write

HUB = "hf-hub:"  # before a repository's name, as timm has it
HUB_FILENAME = "model.safetensors"
LAYOUT = (HUB_FILENAME, "pytorch_model.bin")
_TIMEOUT_S = 60.0
_log = logging.getLogger(__name__)
_SHA256 = re.compile(r"[0-9a-f]{64}")


def fetch(tag: str | WeightsEntry) -> Path:
    """Return the file of a tag: from weights/, then from the cache, then downloaded.

    Downloads go to the caches of huggingface_hub and torch.hub. A known hash is always checked.
    Where an original file cannot be found, a warning names the copy of its weights.

    Raises:
        CheckpointError: it can neither be found nor downloaded, or its hash is wrong.
        InputError: there is no such tag.
    """
    entry = tag if isinstance(tag, WeightsEntry) else find(tag)
    local = weights_dir() / entry.file
    if local.is_file():
        if entry.sha256 is not None:
            verify(local, entry.sha256, entry.tag)
        return local
    try:
        path, published = _download(entry)
    except CheckpointError:
        raise
    except Exception as error:  # the hub's client, its transports and urllib each have their own
        if entry.copy is not None:
            _log.warning(
                "%s: %s (%s): the same weights are in %s, which is taken",
                entry.tag,
                entry.url,
                error,
                entry.copy,
            )
            return fetch(entry.copy)
        raise CheckpointError(
            f"could not get {entry.tag} ({type(error).__name__}: {error}): connect to the network,"
            f" or put the file of {_address(entry)} at {local} or elsewhere and give its path"
        ) from error
    verify(path, entry.sha256 or published, entry.tag)
    return path


def _address(entry: WeightsEntry) -> str:
    if entry.hub_id:
        return f"https://huggingface.co/{entry.hub_id}/resolve/main/{HUB_FILENAME}"
    return entry.url or "the repository"


def _download(entry: WeightsEntry) -> tuple[Path, str | None]:
    """Return the file and the hash its publisher states, if any."""
    if entry.hub_id:
        path = from_hub(entry.hub_id, HUB_FILENAME)
        return path, hub_sha256(path)
    if entry.url:
        import torch

        cached = Path(torch.hub.get_dir()) / "checkpoints" / entry.file
        return from_url(entry.url, cached), None
    raise CheckpointError(
        f"{entry.tag} is not among the files of this installation: expected "
        f"{weights_dir() / entry.file}; get it from the project's repository"
    )


def from_hub(repo_id: str, filename: str, revision: str | None = None) -> Path:
    """Return a file of a Hugging Face repository, out of the hub's cache or downloaded into it.

    Raises:
        OSError, ValueError: it is neither cached nor can it be downloaded.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(repo_id, filename, revision=revision, local_files_only=True))
    except EntryNotFoundError:  # not cached
        return Path(hf_hub_download(repo_id, filename, revision=revision))


def from_hub_layout(repo_id: str) -> tuple[Path, Path | None]:
    """Return the weights of a repository laid out as timm does, and its config.json if it has one.

    Raises:
        CheckpointError: they cannot be downloaded, or the hash is not the hub's.
    """
    try:
        path = _first_from_hub(repo_id, LAYOUT)
        # of the weights' commit, as the repository may have changed since they were cached
        commit = None if path is None else path.parent.name
        config = _first_from_hub(repo_id, ("config.json",), commit)
    except Exception as error:  # the hub's client and its transports each have their own
        raise CheckpointError(
            f"could not get hf-hub:{repo_id} ({type(error).__name__}: {error}): check the name and"
            " the network; a private repository needs the variable HF_TOKEN"
        ) from error
    if path is None:
        raise CheckpointError(f"expected {' or '.join(LAYOUT)} in hf-hub:{repo_id}, got neither")
    if (published := hub_sha256(path)) is not None:
        verify(path, published, f"hf-hub:{repo_id}")
    return path, config


def _first_from_hub(
    repo_id: str, names: tuple[str, ...], revision: str | None = None
) -> Path | None:
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    for name in names:
        try:
            return from_hub(repo_id, name, revision)
        except LocalEntryNotFoundError:  # there is no network
            raise
        except EntryNotFoundError:
            continue
    return None


def from_layout(folder: Path) -> tuple[Path, Path | None]:
    """`from_hub_layout` of a folder.

    Raises:
        CheckpointError: there are no weights in it.
    """
    for name in LAYOUT:
        if (folder / name).is_file():
            config = folder / "config.json"
            return folder / name, config if config.is_file() else None
    raise CheckpointError(f"expected {' or '.join(LAYOUT)} in {folder}, got neither")


def hub_sha256(path: Path) -> str | None:
    """Return the hash the hub gave a cached large file: the cache names its blob by it."""
    if not path.is_symlink():  # a cache on a file system without links
        return None
    name = Path(os.readlink(path)).name
    return name if _SHA256.fullmatch(name) else None


def from_url(url: str, path: Path) -> Path:
    """Download `url` to `path` unless it is there; whole or not at all.

    `torch.hub.download_url_to_file` waits for ever, follows https to http, and takes a connection
    that was cut for the end of a file: the original files have no published hash to notice by.

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
            shutil.copyfileobj(response, stream)
            received = stream.tell()
        if length is not None and received != int(length):
            raise OSError(f"got {received} of {length} bytes")
    return path


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's contents, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def verify(path: Path, expected: str | None, tag: str) -> None:
    """Check a file's hash; warn where none is known.

    Raises:
        CheckpointError: the hash is another.
    """
    found = sha256(path)
    if expected is None:
        warnings.warn(
            f"{tag}: no published hash to check {path} against; its sha256 is {found}",
            stacklevel=2,
        )
    elif found != expected:
        raise CheckpointError(
            f"{path} is not the published {tag}: expected sha256 {expected}, got {found}. It is "
            "damaged or was replaced: delete it and try again"
        )
