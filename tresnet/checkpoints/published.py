"""Read weights/manifest.json, the list of published weights."""

import csv
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tresnet.errors import CheckpointError, InputError, unknown
from tresnet.models.zoo import find_variant
from tresnet.settings import CROP

_PRETRAINED_CFG = ("num_classes", "input_size", *CROP, "license")


@dataclass(frozen=True)
class WeightsEntry:
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


def class_names(entry: WeightsEntry) -> tuple[Sequence[str] | None, Sequence[str] | None]:
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
def _entries(manifest: Path) -> dict[str, WeightsEntry]:
    try:
        rows = json.loads(manifest.read_text(encoding="utf-8"))["weights"]
    except OSError as error:
        raise CheckpointError(
            f"{manifest} cannot be read ({error.strerror}): install tresnet by pip, not as a zip"
        ) from error
    return {
        row["tag"]: WeightsEntry(**{**row, "input_size": tuple(row["input_size"])}) for row in rows
    }


def entries() -> dict[str, WeightsEntry]:
    """Return a dict from each tag to the tag's `WeightsEntry`."""
    return _entries(weights_dir() / "manifest.json")


def list_weights(name: str | None = None) -> list[str]:
    """Return the sorted tags of published weights, of all variants or only of variant `name`.

    An unknown variant raises InputError.
    """
    if name is not None:
        find_variant(name)
    return sorted(tag for tag, entry in entries().items() if name in (None, entry.model))


def find(tag: str) -> WeightsEntry:
    """Return a tag's `WeightsEntry`; an unknown tag raises InputError with the nearest tag."""
    table = entries()
    if tag not in table:
        raise InputError(f"{unknown('weights', tag, table)} (or give the path of a file)")
    return table[tag]


def locate(name: str | os.PathLike[str]) -> WeightsEntry | Path:
    """Return the `WeightsEntry` for a tag, or a `Path` for a path; other names raise InputError."""
    if not isinstance(name, str | os.PathLike):
        raise InputError(f"expected a tag or the path of weights, got {type(name).__name__}")
    try:
        text = os.fsdecode(os.fspath(name))
        if text in entries():
            return entries()[text]
        path = Path(text)
        if path.exists() or os.sep in text or path.suffix in (".safetensors", ".pth", ".pt"):
            return path
    except (ValueError, OSError) as error:  # an invalid path
        raise InputError(f"expected a tag or the path of weights, got {name!r:.80}") from error
    return find(text)
