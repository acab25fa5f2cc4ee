"""A multi-label data set: one to four real handwritten digits on one canvas.

Digits of `tresnet.data.digits` are drawn at twice their size in random cells of a 2 x 2 grid. The
images of a split show only digits of that split. All random numbers come from Python's `random()`,
which gives equal values on all machines and in all versions of Python.
"""

import csv
import random
from pathlib import Path

import numpy as np

from tresnet.data import digits

NAME = "digits_multilabel"
COUNTS = {"train": 3000, "val": 750}
CELL, DIGIT = 20, 16
SIZE = 2 * CELL
# `digits.digest` of the folder that `write` makes.
DIGEST = "0ab7169744c3d2b63d5377b242dda643c4483db3b80a0c0d126f1cf2e50a4d31"


def write(root: str | Path) -> Path:
    """Write `<root>/digits_multilabel/{train,val}.csv` and their images, unless already there.

    The folder appears complete or not at all. Images are grey PNG files of 40 x 40 pixels. Returns
    the folder, for `open_split`. Raises DataError if the folder exists with other data.
    """
    return digits.write_once(Path(root) / NAME, _write_splits, DIGEST)


def canvas(
    pixels: np.ndarray, labels: np.ndarray, members: np.ndarray, seed: str
) -> tuple[np.ndarray, list[int]]:
    """Draw one to four digits on a grey image (40, 40), uint8; return the image and ten labels.

    Label d is 1 if digit d is drawn, otherwise 0. `pixels` (N, 8, 8), uint8, and `labels` (N,) hold
    all digits. `members` are the indices of the digits that may be drawn. `seed` determines which
    digits are drawn, and where.
    """
    draw = random.Random(seed).random
    image, label_vector = np.zeros((SIZE, SIZE), dtype=np.uint8), [0] * len(digits.CLASSES)
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


def _write_splits(folder: Path) -> None:
    from PIL import Image

    images, labels = digits.load()
    pixels = digits.to_uint8(images)
    held_out = digits.split_of(labels)
    for split, count in COUNTS.items():
        members = np.flatnonzero(held_out if split == "val" else ~held_out)
        (folder / split).mkdir(parents=True)
        rows: list[tuple[object, ...]] = [("image", *digits.CLASSES)]
        for number in range(count):
            image, label_vector = canvas(pixels, labels, members, f"{split} {number}")
            name = f"{split}/{number:04d}.png"
            Image.fromarray(image).save(folder / name)
            rows.append((name, *label_vector))
        with (folder / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
