"""The data sets `digits` and `digits_multilabel`, of handwritten digits that scikit-learn ships.

The 1797 digits (8 x 8 grey) are the test half of UCI's "Optical Recognition of Handwritten Digits".
`digits` has them as PNG files in class folders. One person's digits may be in both splits, because
the data do not name the persons who wrote them. `digits_multilabel` has one to four of them on a
canvas: at twice their size, in random cells of a 2 x 2 grid. A split's canvases show digits of that
split. Random numbers come from Python's `random()`, which is the same everywhere.
"""

import csv
import hashlib
import os
import random
from pathlib import Path

import numpy as np

from tresnet import writing
from tresnet.data.channels import SUFFIXES
from tresnet.data.folder import is_hidden
from tresnet.errors import DataError, WriteError, needed

CLASSES = tuple(str(digit) for digit in range(10))
IMAGES = 1797
SPLIT_SEED = 0
VAL_FRACTION = 0.2
CANVASES = {"train": 3000, "val": 750}
CELL, DIGIT = 20, 16
SIZE = 2 * CELL
# `digest` of the folders that `write` makes. It covers paths, and so each image's split.
DIGESTS = {
    "digits": "70c36a9ad3fa6dae1b2b6abb55ace8d81db22aafc329cc19600b6c89ab097fa1",
    "digits_multilabel": "0ab7169744c3d2b63d5377b242dda643c4483db3b80a0c0d126f1cf2e50a4d31",
}


def write(root: str | Path, name: str = "digits") -> Path:
    """Write the data set `<root>/<name>`, unless already there, and return its folder.

    `digits` has images of 8 x 8 pixels, `{train,val}/<0..9>/<index>.png`, with values scaled from
    0..16 to 0..255. `digits_multilabel` has canvases of 40 x 40 pixels, and their labels in
    `{train,val}.csv`. All images are grey. The folder appears complete or not at all, even if
    several processes write it at once. Raises DataError if the folder exists with other images.
    """
    target, expected = Path(root) / name, DIGESTS[name]
    if not target.exists() and not target.is_symlink():
        try:
            with writing.atomic_directory(target) as folder:
                with writing.as_write_error(target):
                    (_write_pngs if name == "digits" else _write_canvases)(folder)
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
            f"expected the {name} as written by tresnet in {target}, but found other or damaged "
            "content: move or delete that folder, or pass another root"
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


def load() -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's digits: images (1797, 8, 8), uint8, and labels (1797,)."""
    with needed("the data set of digits", "digits"):
        from sklearn.datasets import load_digits
    images, labels = load_digits(return_X_y=True)
    pixels = (np.asarray(images).astype(np.int64) * 255 + 8) // 16  # 0..16 becomes 0..255
    return pixels.reshape(-1, 8, 8).astype(np.uint8), np.asarray(labels)


def _write_pngs(folder: Path) -> None:
    from PIL import Image

    pixels, labels = load()
    for index, (label, held_out) in enumerate(zip(labels, split_of(labels), strict=True)):
        place = folder / ("val" if held_out else "train") / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[index]).save(place / f"{index:04d}.png")


def canvas(
    pixels: np.ndarray, labels: np.ndarray, members: np.ndarray, seed: str
) -> tuple[np.ndarray, list[int]]:
    """Draw one to four digits on a grey image (40, 40), uint8; return the image and ten labels.

    Label d is 1 if digit d is drawn, otherwise 0. `pixels` (N, 8, 8), uint8, and `labels` (N,) hold
    all digits. `members` are the indices of the digits that may be drawn. `seed` determines which
    digits are drawn, and where.
    """
    draw = random.Random(seed).random
    image, label_vector = np.zeros((SIZE, SIZE), dtype=np.uint8), [0] * len(CLASSES)
    cells = sorted(range(4), key=lambda _: draw())[: 1 + int(4 * draw())]
    for cell in cells:
        index = members[int(len(members) * draw())]
        free = CELL - DIGIT + 1
        top = CELL * (cell // 2) + int(free * draw())
        left = CELL * (cell % 2) + int(free * draw())
        enlarged = pixels[index].repeat(2, axis=0).repeat(2, axis=1)
        image[top : top + DIGIT, left : left + DIGIT] = enlarged
        label_vector[int(labels[index])] = 1
    return image, label_vector


def _write_canvases(folder: Path) -> None:
    from PIL import Image

    pixels, labels = load()
    held_out = split_of(labels)
    for split, count in CANVASES.items():
        members = np.flatnonzero(held_out if split == "val" else ~held_out)
        (folder / split).mkdir(parents=True)
        rows: list[tuple[object, ...]] = [("image", *CLASSES)]
        for number in range(count):
            image, label_vector = canvas(pixels, labels, members, f"{split} {number}")
            name = f"{split}/{number:04d}.png"
            Image.fromarray(image).save(folder / name)
            rows.append((name, *label_vector))
        with (folder / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


def digest(folder: Path) -> str | None:
    """Return the SHA-256 of paths, images and CSV files, or None if a file is damaged.

    An image's pixels are hashed, because versions of zlib compress equal pixels differently.
    """
    from PIL import Image

    sha256 = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        relative, suffix = path.relative_to(folder), path.suffix.lower()
        is_table = suffix == ".csv"
        if not (is_table or suffix in SUFFIXES) or any(map(is_hidden, relative.parts)):
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
