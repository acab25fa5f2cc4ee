"""Download published weights, and compare the files' hashes with the published hashes."""

import hashlib
import logging
import os
import re
import warnings
from pathlib import Path

from tresnet.checkpoints.published import WeightsEntry, find, weights_dir
from tresnet.errors import CheckpointError

HUB = "hf-hub:"  # prefix of a repository's name, as in timm
HUB_FILENAME = "model.safetensors"
LAYOUT = (HUB_FILENAME, "pytorch_model.bin")
_log = logging.getLogger(__name__)
_SHA256 = re.compile(r"[0-9a-f]{64}")


def fetch(tag: str | WeightsEntry) -> Path:
    """Return the path of a tag's file in weights/ or the hub's cache, after a download if needed.

    If the authors no longer offer a file, a copy of the same weights is used, with a warning.
    CheckpointError: the file is not available, or its SHA-256 is not the published one.
    """
    entry = tag if isinstance(tag, WeightsEntry) else find(tag)
    local = weights_dir() / entry.file
    if local.is_file():
        if entry.sha256 is not None:
            verify(local, entry.sha256, entry.tag)
        return local
    if entry.copy is not None:
        gone = "%s: its authors no longer offer %s; the same weights are in %s, which is used"
        _log.warning(gone, entry.tag, entry.url, entry.copy)
        return fetch(entry.copy)
    if entry.hub_id is None:
        raise CheckpointError(
            f"{entry.tag} is not among the files of this installation: expected {local}; get it "
            "from the project's repository"
        )
    address = f"https://huggingface.co/{entry.hub_id}/resolve/main/{HUB_FILENAME}"
    advice = (
        f"connect to the network, or put the file of {address} at {local} or elsewhere and give "
        "its path"
    )
    path = _first_from_hub(entry.hub_id, (HUB_FILENAME,), advice)
    verify(path, entry.sha256 or _hub_sha256(path), entry.tag)
    return path


def from_hub_layout(repo_id: str) -> tuple[Path, Path | None]:
    """Return a hub repository's paths of weights and of config.json (None if it is missing)."""
    advice = "check the name and the network; a private repository needs the variable HF_TOKEN"
    path = _first_from_hub(repo_id, LAYOUT, advice)
    if (published := _hub_sha256(path)) is not None:
        verify(path, published, HUB + repo_id)
    try:
        # Read config.json from the weights' commit, since cached weights may be of an old commit.
        return path, _first_from_hub(repo_id, ("config.json",), advice, path.parent.name)
    except _AbsentError:
        return path, None


class _AbsentError(CheckpointError):
    """A hub repository has none of the requested files."""


def _first_from_hub(
    repo_id: str, names: tuple[str, ...], advice: str, revision: str | None = None
) -> Path:
    """Return the path of the first of `names` in a hub repository, downloaded if not cached."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    for name in names:
        for cached in (True, False):  # a cached file needs no network
            try:
                path = hf_hub_download(repo_id, name, revision=revision, local_files_only=cached)
                return Path(path)
            except Exception as error:  # huggingface_hub raises errors of many types
                local = isinstance(error, LocalEntryNotFoundError)
                if isinstance(error, EntryNotFoundError) and local == cached:
                    continue  # the file is not in the cache or repository
                raise CheckpointError(
                    f"could not get {HUB}{repo_id} ({type(error).__name__}: {error}): {advice}"
                ) from error
    raise _AbsentError(f"expected {' or '.join(names)} in {HUB}{repo_id}, got neither")


def from_layout(folder: Path) -> tuple[Path, Path | None]:
    """Return a folder's paths of weights and of config.json (None if it is missing)."""
    for name in LAYOUT:
        if (folder / name).is_file():
            config = folder / "config.json"
            return folder / name, config if config.is_file() else None
    raise CheckpointError(f"expected {' or '.join(LAYOUT)} in {folder}, got neither")


def _hub_sha256(path: Path) -> str | None:
    """Return the SHA-256 that names the file to which `path` links; None without such a link."""
    if not path.is_symlink():  # some file systems have no symbolic links
        return None
    name = Path(os.readlink(path)).name
    return name if _SHA256.fullmatch(name) else None


def verify(path: Path, expected: str | None, tag: str) -> None:
    """Raise CheckpointError unless the file's SHA-256 is `expected`; warn if `expected` is None."""
    with path.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    if expected is None:
        warnings.warn(
            f"{tag}: no published hash to check {path} against; its sha256 is {sha256}",
            stacklevel=2,
        )
    elif sha256 != expected:
        raise CheckpointError(
            f"{path} is not the published {tag}: expected sha256 {expected}, got {sha256}. It is "
            "damaged or was replaced: delete it and try again"
        )
