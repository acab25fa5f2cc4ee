"""The data set `digits`: 1797 real handwritten digits (8 x 8 grey) that ship with scikit-learn.

The digits are the test half of UCI's "Optical Recognition of Handwritten Digits". `write` saves the
digits as PNG files in class folders. One person's digits may be in both splits, because the data do
not name the persons who wrote them.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tresnet import files
from tresnet.data.folder import is_hidden, is_image
from tresnet.errors import DataError, WriteError, needed

CLASSES = tuple(str(digit) for digit in range(10))
IMAGES = 1797
SPLIT_SEED = 0
VAL_FRACTION = 0.2
# `digest` of the folder that `write` makes. It covers paths, and so each image's split.
DIGEST = "70c36a9ad3fa6dae1b2b6abb55ace8d81db22aafc329cc19600b6c89ab097fa1"


def write(root: str | Path) -> Path:
    """Write the digits to `<root>/digits/{train,val}/<0..9>/<index>.png`, unless already there.

    The folder appears complete or not at all, even if several processes write it at once. Images
    are 8 x 8 and grey, with values scaled from 0..16 to 0..255. Returns `<root>/digits`, a folder
    for `open_folder`. Raises DataError if the folder exists with other images.
    """
    return write_once(Path(root) / "digits", _write_pngs, DIGEST)


def write_once(target: Path, fill: Callable[[Path], None], expected: str) -> Path:
    """Create the folder `target` unless it exists; check the digest of a new or existing folder.

    `fill` writes to a temporary folder. A digest other than `expected` raises DataError.
    """
    if not target.exists() and not target.is_symlink():
        try:
            with files.atomic_directory(target) as folder:
                with files.as_write_error(target):
                    fill(folder)
                if digest(folder) != expected:
                    raise DataError(
                        f"expected the {IMAGES} digits of scikit-learn 1.5 or later, but the "
                        "installed version ships other data: pip install 'tresnet[digits]'"
                    )
            return target
        except WriteError:
            if not target.exists():  # otherwise another process wrote the folder first
                raise
    if digest(target) != expected:
        raise DataError(
            f"expected the {target.name} as written by tresnet in {target}, but found other or "
            "damaged content: move or delete that folder, or pass another root"
        )
    return target


def split_of(labels: np.ndarray) -> np.ndarray:
    """Return a bool mask (N,) of validation images: hashes of indices choose a fifth per class."""
    ranks = [
        hashlib.sha256(f"{SPLIT_SEED}:{index}".encode()).digest() for index in range(len(labels))
    ]
    held_out = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = sorted(np.flatnonzero(labels == label), key=lambda index: ranks[index])
        held_out[members[: round(VAL_FRACTION * len(members))]] = True
    return held_out


def to_uint8(images: np.ndarray) -> np.ndarray:
    """Scale grey values 0..16 to 0..255, rounded to the nearest integer; .5 is rounded up."""
    return ((images.astype(np.int64) * 255 + 8) // 16).astype(np.uint8)


def load() -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's digits: float images (1797, 8, 8) in 0..16, and labels (1797,)."""
    with needed("the data set of digits", "digits"):
        from sklearn.datasets import load_digits
    pixels, labels = load_digits(return_X_y=True)
    return np.asarray(pixels).reshape(-1, 8, 8), np.asarray(labels)


def _write_pngs(folder: Path) -> None:
    from PIL import Image

    images, labels = load()
    for split in ("train", "val"):
        for name in CLASSES:
            (folder / split / name).mkdir(parents=True)
    pixels, held_out = to_uint8(images), split_of(labels)
    for index, label in enumerate(labels):
        split = "val" if held_out[index] else "train"
        Image.fromarray(pixels[index]).save(folder / split / str(label) / f"{index:04d}.png")


def digest(folder: Path) -> str | None:
    """Return the SHA-256 of paths, images and CSV files, or None if a file is damaged.

    An image's pixels are hashed, because versions of zlib compress equal pixels differently.
    """
    from PIL import Image

    sha256 = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        is_table = path.suffix == ".csv"
        relative = path.relative_to(folder)
        if not (is_table or is_image(path.name)) or any(map(is_hidden, relative.parts)):
            continue
        name = os.fsencode(relative.as_posix())
        try:
            if is_table:
                sha256.update(name + b"\n" + path.read_bytes())
                continue
            with Image.open(path) as image:
                pixels = image.tobytes()
                sha256.update(name + f" {image.mode} {image.size}\n".encode() + pixels)
        except Exception:  # decoders raise many types of errors for damaged data
            return None
    return sha256.hexdigest()
