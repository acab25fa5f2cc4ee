"""Split images into train and val by their labels, and find images that are in both."""

import csv
import functools
import hashlib
import io
import logging
import os
import re
from pathlib import Path

import numpy as np

from tresnet import writing
from tresnet.data.channels import SUFFIXES
from tresnet.data.dataset import Paths
from tresnet.data.folder import read_folder
from tresnet.data.label_files import image_folders, read_file, read_table
from tresnet.data.labels import CLASSES_FILE, Labels, RawLabels, check_unique, encode
from tresnet.errors import InputError

logger = logging.getLogger(__name__)

_READ, _PART = 2000, 2**16  # images that `in_both` reads, and their bytes


def stratified(labels: Labels, fraction: float, seed: int) -> np.ndarray:
    """Return a bool mask (N,) of images to validate: about `fraction` of each class's images.

    Rare classes come first, as few images can fill them, and each has an image on both sides if it
    can (after Sechidis et al., "On the Stratification of Multi-Label Data", 2011).
    """
    rank = np.random.default_rng(seed).permutation(len(labels))
    lengths = 1 if labels.ends is None else np.diff(labels.ends, prepend=0)
    members = np.repeat(np.arange(len(labels)), lengths)[labels.indices.argsort(kind="stable")]
    counts, stops = labels.counts, labels.counts.cumsum()
    held_out, free = np.zeros(len(labels), bool), np.ones(len(labels), bool)

    def assign(images: np.ndarray, wanted: int) -> None:
        images = images[rank[images].argsort()]
        held_out[images[: max(wanted, 0)]] = True
        free[images] = False

    for label in counts.argsort(kind="stable"):
        count, images = int(counts[label]), members[stops[label] - counts[label] : stops[label]]
        wanted = min(max(round(fraction * count), 1), count - 1)
        assign(images[free[images]], wanted - int(held_out[images].sum()))
    assign(np.flatnonzero(free), round(fraction * int(free.sum())))  # images without labels
    return held_out


def write_splits(
    source: Path, fraction: float, seed: int = 0, separator: str | None = None
) -> dict[str, int]:
    """Write train.csv and val.csv, which share the images of a folder of classes or of a CSV file.

    They appear in the folder `source`, or beside the file `source`, and name the images where they
    are. For a folder, classes.txt has the order of its classes. Returns the number of images of
    each split. InputError: one of these files exists, a split would have no image, or a name is not
    UTF-8. DataError: labels cannot be read, or an image is listed twice.
    """
    root, contents = Path(os.path.abspath(source)), dict[str, str]()
    if source.is_dir():
        suffixes = SUFFIXES if any(image_folders(root, SUFFIXES)) else (".npy",)
        paths, raw = read_folder(root.parent, root.name, suffixes)
        labels, header = encode(raw), ["image", "label"]
        names = [labels.names[label] for label in labels.indices]
        rows = [[os.path.relpath(p, root), name] for p, name in zip(paths, names, strict=True)]
        contents[CLASSES_FILE] = "\n".join(labels.names) + "\n"
        if len(contents[CLASSES_FILE].splitlines()) != len(labels.names):
            raise InputError(f"expected names of folders in {source} without line breaks: rename")
    elif source.suffix.lower() == ".json":
        raise InputError(f"expected a folder or a CSV file, got {source}: write its labels as CSV")
    else:
        (header, numbered), root = read_table(source), root.parent
        several = [name.lower() for name in header[1:]] != ["label"]
        classes, listing, *reading = read_file(source, several, separator)
        check_unique((os.path.normpath(path.strip()) for path, _ in listing), "image", source)
        found = [labels for _, labels in listing]
        labels = encode(RawLabels.of(str(source), found, several, classes, *reading))
        if labels.reading:
            logger.warning("%s: %s", source, labels.describe())
        rows = [row for _, row in numbered]
    held_out = stratified(labels, fraction, seed)
    if held_out.all() or not held_out.any():
        raise InputError(f"expected images for train and val, got {len(rows)} in all: add some")
    for split, chosen in (("train", ~held_out), ("val", held_out)):
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([header, *(rows[image] for image in np.flatnonzero(chosen))])
        contents[f"{split}.csv"] = text.getvalue()
    if existing := [name for name in contents if (root / name).exists()]:
        raise InputError(f"expected no {existing[0]} in {root}: remove or rename it")
    lines = "".join(contents.values()).split("\n")
    if odd := next(filter(re.compile(r"[\ud800-\udfff]").search, lines), None):
        raise InputError(f"expected names in UTF-8, got {odd!a}: rename such files and folders")
    for name, content in contents.items():
        writing.write_text(root / name, content)
    return {"train": int((~held_out).sum()), "val": int(held_out.sum())}


def in_both(train: Paths, val: Paths) -> list[tuple[str, str]]:
    """Return the paths of images in `val`, each with that of an equal image in `train`.

    These are equal paths, and files of one size that begin with the same 64 KiB. Up to 2000 images
    are read, in random order.
    """
    held_out, sizes = set(val), train.sizes
    if both := [(path, path) for path in train if path in held_out]:
        return both

    @functools.cache
    def digest(path: str) -> bytes:
        try:
            with open(path, "rb") as file:
                return hashlib.sha256(file.read(_PART)).digest()
        except OSError:  # reading the image raises or skips it, so here it equals no other
            return os.fsencode(path)

    order = sizes.argsort(kind="stable")
    first, last = (sizes[order].searchsorted(val.sizes, side) for side in ("left", "right"))
    for image in np.random.default_rng(0).permutation(np.flatnonzero(val.sizes > 0)):
        for other in order[first[image] : last[image]]:
            if digest.cache_info().currsize > _READ:
                return both
            if digest(train[other]) == digest(val[image]):
                both.append((val[image], train[other]))
                break
    return both
