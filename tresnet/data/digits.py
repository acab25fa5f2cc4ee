"""The data set `digits`: 1797 real handwritten digits (8 x 8 grey) that ship with scikit-learn.

The digits are the test half of UCI's "Optical Recognition of Handwritten Digits". `write` makes
class folders of PNG files for `open_folder`. One writer's digits may be in both splits, because the
data do not name the writers.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tresnet import files
from tresnet.data.folder import EXTENSIONS
from tresnet.errors import DataError, WriteError, needed

CLASSES = tuple(str(digit) for digit in range(10))
IMAGES = 1797
COUNTS = {"train": 1438, "val": 359}
SPLIT_SEED = 0
VAL_FRACTION = 0.2
# Result of `digest` for the correct folder. It hashes paths too, so each image has a fixed split.
DIGEST = "70c36a9ad3fa6dae1b2b6abb55ace8d81db22aafc329cc19600b6c89ab097fa1"


def write(root: str | Path) -> Path:
    """Write the digits to `<root>/digits/{train,val}/<0..9>/<index>.png` unless these files exist.

    The folder appears complete or not at all, even if several processes write it at once. Images
    are 8 x 8 and grey, with values scaled from 0..16 to 0..255. The result is `<root>/digits`, for
    `open_folder`. If this folder exists with other images, `DataError` is raised.
    """
    return place(Path(root) / "digits", _write_pngs, DIGEST)


def place(target: Path, fill: Callable[[Path], None], expected: str) -> Path:
    """Create `target` unless it exists: `fill` writes a temporary folder, which is then renamed.

    DataError is raised if the digest of `target` or of the written files is not `expected`.
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
            "damaged content, which is left alone: move or delete that folder, or pass another root"
        )
    return target


def split_of(labels: np.ndarray) -> np.ndarray:
    """Return a mask (N,) of validation images. The indices' hashes select a fifth of each class."""
    ranks = [
        hashlib.sha256(f"{SPLIT_SEED}:{index}".encode()).digest() for index in range(len(labels))
    ]
    held_out = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = sorted(np.flatnonzero(labels == label), key=lambda index: ranks[index])
        held_out[members[: round(VAL_FRACTION * len(members))]] = True
    return held_out


def to_uint8(images: np.ndarray) -> np.ndarray:
    """Scale grey values 0..16 to 0..255, rounded to the nearest integer. Halves are rounded up."""
    return ((images.astype(np.int64) * 255 + 8) // 16).astype(np.uint8)


def load() -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's digits: float images (1797, 8, 8) of 0..16 and labels (1797,)."""
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
    """Return the SHA-256 of all images (path, pixels) and CSV tables; None if a file is damaged.

    Images are hashed by pixels, because versions of zlib may compress them to different bytes.
    """
    from PIL import Image

    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        is_table = path.suffix == ".csv"
        if not is_table and not path.name.lower().endswith(EXTENSIONS):
            continue
        place = os.fsencode(path.relative_to(folder).as_posix())
        try:
            if is_table:
                found.update(place + b"\n" + path.read_bytes())
                continue
            with Image.open(path) as image:
                pixels = image.tobytes()
                found.update(place + f" {image.mode} {image.size}\n".encode() + pixels)
        except Exception:  # decoders raise many types for damaged data
            return None
    return found.hexdigest()
