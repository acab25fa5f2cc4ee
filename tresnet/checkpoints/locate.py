"""Find published weights in weights/manifest.json, and weights in timm's layout; download them.

The hashes of downloaded files are compared with the published hashes.
"""

import contextlib
import csv
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tresnet.checkpoints.read import INDEX, read_index
from tresnet.errors import CheckpointError, InputError, unknown
from tresnet.models.zoo import find_variant
from tresnet.settings import CROP

HUB = "hf-hub:"  # prefix of a repository's name, as in timm
LOCAL = "local-dir:"  # prefix of a directory's path, as in timm
SUFFIXES = (".safetensors", ".pth", ".pt")
HUB_FILENAME = "model.safetensors"
# Names of weights in timm's layout, and transformers' for the index of several files.
LAYOUT = (HUB_FILENAME, "pytorch_model.bin", HUB_FILENAME + INDEX, "pytorch_model.bin" + INDEX)
_ADVICE = "check the name and the network; a private repository needs the variable HF_TOKEN"
_log = logging.getLogger(__name__)
_PRETRAINED_CFG = ("num_classes", "input_size", *CROP, "license")


class Published(NamedTuple):
    """Published weights, as described in weights/manifest.json."""

    tag: str  # MODEL.TAG, as in timm
    model: str
    format: str  # 'tresnet' (with metadata), 'timm', or 'public' (the format of the authors' code)
    file: str  # path relative to weights/
    hub_id: str | None  # Hugging Face repository with `file` as model.safetensors
    url: str | None  # the authors' address of the file, perhaps no longer valid
    sha256: str | None
    license: str  # SPDX identifier
    trained_on: str
    num_classes: int
    input_size: tuple[int, int, int]  # channels, height, width
    crop_pct: float
    crop_mode: str
    interpolation: str
    top1: float | None  # in per cent, on the validation images of the last data set in `trained_on`
    top5: float | None
    accuracy_source: str | None  # who measured the accuracy, and how
    command: str | None = None  # the command that trained the weights, if this project did
    copy: str | None = None  # tag of equal weights that can be downloaded, if this file cannot

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        """Fields of timm's `pretrained_cfg`: origin, licence, classes, resizing and cropping."""
        return {
            "tag": self.tag.partition(".")[2],
            "hf_hub_id": self.hub_id,
            "url": self.url or "",
            **{name: getattr(self, name) for name in _PRETRAINED_CFG},
        }


def class_names(entry: Published) -> tuple[Sequence[str] | None, Sequence[str] | None]:
    """Return the ImageNet classes as WordNet ids and as words; (None, None) if unknown."""
    subset = {1000: "imagenet", 11221: "imagenet21k_miil"}.get(entry.num_classes)
    timm = find_spec("timm")
    if subset is None or "ImageNet" not in entry.trained_on or timm is None:
        return None, None
    # read timm's files here: its ImageNetInfo reads them too, but takes three seconds to import
    folder = Path(str(timm.origin)).parent / "data" / "_info"
    names = (folder / f"{subset}_synsets.txt").read_text(encoding="utf-8").splitlines()
    lines = (folder / "imagenet_synset_to_lemma.txt").read_text(encoding="utf-8").splitlines()
    lemmas = dict(csv.reader(lines, delimiter="\t"))
    return names, [lemmas[name] for name in names]


def weights_dir() -> Path:
    """Return the folder `weights`: in an installed package, or beside `tresnet` in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "weights"
    return inside if (inside / "manifest.json").is_file() else package.parent / "weights"


@cache
def entries() -> dict[str, Published]:
    """Return a dict from each tag to its `Published`; a model's first tag is timm's default."""
    rows = json.loads((weights_dir() / "manifest.json").read_text(encoding="utf-8"))["weights"]
    return {
        row["tag"]: Published(**{**row, "input_size": tuple(row["input_size"])}) for row in rows
    }


def list_weights(name: str | None = None) -> list[str]:
    """Return the sorted tags of published weights, of all variants or only of variant `name`.

    An unknown variant raises InputError.
    """
    if name is not None:
        find_variant(name)
    return sorted(tag for tag, entry in entries().items() if name in (None, entry.model))


class Source(NamedTuple):
    """Where weights are."""

    name: str  # as requested
    path: Path  # of the file of weights, or of the index of several files
    config_json: Path | None = None  # timm's description, if any
    entry: Published | None = None  # of a tag


def locate(name: str | os.PathLike[str]) -> Source:
    """Find weights by tag, path, directory or hub name, and download them if needed.

    For the names and errors, see `tresnet.checkpoints.describe.open_checkpoint`.
    """
    if not isinstance(name, str | os.PathLike):
        raise InputError(f"expected a tag or the path of weights, got {type(name).__name__}")
    text = os.fsdecode(name)
    if text.startswith(HUB):
        return Source(text, *from_layout(text))
    if entry := entries().get(text):
        return Source(text, fetch(entry), entry=entry)
    path = Path(text.removeprefix(LOCAL))
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
            path.stat()  # From Python 3.14 on, the methods below raise no errors.
        if path.is_dir():
            return Source(text, *from_layout(str(path)))
        if not path.exists() and os.sep not in text and path.suffix not in SUFFIXES:
            raise InputError(f"{unknown('weights', text, entries())} (or give the path of a file)")
    except OSError as error:  # for example a name that is too long
        raise InputError(f"expected a tag or the path of weights, got {name!r:.80}") from error
    return Source(text, path)


def fetch(entry: Published) -> Path:
    """Return the path of an entry's file in weights/ or the hub's cache, downloaded if needed.

    If the authors no longer offer a file, a copy of the same weights is used, with a warning.
    CheckpointError: the file is not available, or its SHA-256 is not the published one.
    """
    local = weights_dir() / entry.file
    if local.is_file():
        verify(local, entry.sha256, entry.tag)
        return local
    if entry.copy is not None:
        gone = "%s: its authors no longer offer %s; the same weights are in %s, which is used"
        _log.warning(gone, entry.tag, entry.url, entry.copy)
        return fetch(entries()[entry.copy])
    if entry.hub_id is None:
        raise CheckpointError(
            f"{entry.tag} is not among the files of this installation: expected {local}; get it "
            "from the project's repository"
        )
    advice = (
        f"connect to the network, or put the file of https://huggingface.co/{entry.hub_id}/resolve/"
        f"main/{HUB_FILENAME} at {local} or elsewhere and give its path"
    )
    get = partial(_from_hub, entry.hub_id, advice=advice)
    path = _first(HUB + entry.hub_id, get, (HUB_FILENAME,))
    verify(path, entry.sha256 or _hub_sha256(path), entry.tag)
    return path


def from_layout(place: str) -> tuple[Path, Path | None]:
    """Return the paths of weights and of config.json (None if it is missing).

    `place` is a directory or `hf-hub:USER/NAME`, whose files are downloaded if needed.
    """
    repo_id = place.removeprefix(HUB)
    if repo_id == place:
        inside = lambda name: path if (path := Path(place, name)).is_file() else None  # noqa: E731
        return _first(place, inside), inside("config.json")
    get = partial(_from_hub, repo_id)
    parts = [path := _first(place, get)]
    # Read other files from the weights' commit, since cached weights may be of an old commit.
    get = partial(get, revision=path.parent.name)
    if path.name.endswith(INDEX):
        parts = [_first(place, get, (name,)) for name in read_index(path)]
    for part in parts:
        verify(part, _hub_sha256(part), place)
    return path, get("config.json")


def _first(place: str, get: Callable[[str], Path | None], names: tuple[str, ...] = LAYOUT) -> Path:
    path = next(filter(None, map(get, names)), None)
    if path is None:
        wanted = " or ".join(names[:2])
        raise CheckpointError(
            f"expected {wanted} in {place}, got neither: of a run, name its best.safetensors"
        )
    return path


def _from_hub(
    repo_id: str, name: str, revision: str | None = None, advice: str = _ADVICE
) -> Path | None:
    """Return the path of a hub repository's file, downloaded if not cached; None without one."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    for cached in (True, False):  # a cached file needs no network
        try:
            path = hf_hub_download(repo_id, name, revision=revision, local_files_only=cached)
            return Path(path)
        except Exception as error:  # huggingface_hub raises errors of many types
            local = isinstance(error, LocalEntryNotFoundError)
            if not isinstance(error, EntryNotFoundError) or local != cached:
                raise CheckpointError(
                    f"could not get {HUB}{repo_id} ({type(error).__name__}: {error}): {advice}"
                ) from error
    return None


def _hub_sha256(path: Path) -> str | None:
    name = path.resolve().name  # of the file in the cache; some file systems have no links
    return name if re.fullmatch(r"[0-9a-f]{64}", name) else None


def verify(path: Path, expected: str | None, name: str) -> None:
    """Raise CheckpointError unless a file's SHA-256 is `expected`, or None for an unknown hash."""
    if expected is None:
        return
    with path.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    if sha256 != expected:
        raise CheckpointError(
            f"{path} is not the published {name}: expected sha256 {expected}, got {sha256}. It is "
            "damaged or was replaced: delete it and try again"
        )
