"""Open images with one label each that a CSV file lists, with the header `image,label`.

Kaggle's competitions have such files. The images may lie anywhere below the data's directory.
"""

import csv
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import dropwhile
from pathlib import Path
from typing import Any

import torch

from tresnet.data.classes import composed, read_names
from tresnet.data.decoding import EncodedImage
from tresnet.data.folder import (
    CLASSES_FILE,
    EXTENSIONS,
    ImageDataset,
    Paths,
    is_hidden,
    is_image,
    visible_files,
)
from tresnet.data.multilabel import INDEX, SEPARATOR, read_table
from tresnet.errors import DataError, listed

LABEL = "label"  # header of the column of labels; `labels` is for any number of labels
_SHOWN = 5


def listing_file(root: Path, split: str) -> Path | None:
    """Return the path of `<root>/<split>.csv` if it lists one label per image, or None.

    DataError is raised if class folders of the split hold other classes than the file.
    """
    path, folder = root / f"{split}.csv", root / split
    if not path.is_file() or not _has_one_label(path):
        return None
    folders = _class_folders(folder)
    if not folders:
        return path
    labels = {composed(row[1].strip()) for _, row in read_table(path)[1]}
    if labels == folders:
        return None  # the folders say the same
    raise DataError(
        f"{folder} has class folders ({listed(sorted(folders), _SHOWN)}), and {path} lists the "
        f"labels {listed(sorted(labels), _SHOWN)}: rename the file to read the folders, or move "
        f"the images out of folders to read the file"
    )


def _has_one_label(path: Path) -> bool:
    """Return whether a file begins with a header such as `image,label`; other files may be any."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header = [name.strip() for name in next(csv.reader(file), [])]
    except (OSError, UnicodeDecodeError, csv.Error):
        return False
    columns = list(dropwhile(INDEX.__contains__, header))
    return len(columns) == 2 and columns[1].lower() == LABEL


def _class_folders(folder: Path) -> set[str]:
    found = visible_files(str(folder), Counter()) if folder.is_dir() else ()
    with_images = [Path(path) for path, names in found if any(map(is_image, names))]
    parts = (path.relative_to(folder).parts for path in with_images)
    return {composed(first) for first, *_ in filter(None, parts)}


def open_listing(
    root: Path,
    split: str,
    transform: Callable[[EncodedImage], Any] | None = None,
    skip_bad_images: bool = False,
) -> ImageDataset:
    """Open the images that `<root>/<split>.csv` lists, with one label each.

    The first column has paths below `root`, below `<root>/<split>`, or below one other folder of
    `root`; a suffix such as .jpg may be missing. Classes are the sorted labels, by value if all are
    numbers, or the lines of `<root>/classes.txt`. DataError is raised if a label or an image is
    missing, or if the file is malformed or empty.
    """
    source = root / f"{split}.csv"
    _, rows = read_table(source)
    if not rows:
        raise DataError(f"expected images in {source}, but it lists none")
    labels = [composed(row[1].strip()) for _, row in rows]
    for (line, _), label in zip(rows, labels, strict=True):
        if not label:
            raise DataError(f"{source}:{line}: expected a label, got none")
    if all(re.fullmatch(r"\d+\.0", label) for label in labels):  # as pandas writes some integers
        labels = [label.removesuffix(".0") for label in labels]
    classes = _classes(root / CLASSES_FILE, labels, source)
    paths = _find_images(root, split, [row[0].strip() for _, row in rows], source)
    index = {name: number for number, name in enumerate(classes)}
    targets = torch.tensor([index[label] for label in labels])
    dataset = ImageDataset(split, classes, Paths(paths), targets, transform, skip_bad_images)
    dataset.inferred = not (root / CLASSES_FILE).is_file()
    return dataset


def _classes(file: Path, labels: Sequence[str], source: Path) -> list[str]:
    present = set(labels)
    if file.is_file():
        classes = read_names(file)
        if unknown := sorted(present - set(classes)):
            raise DataError(
                f"{source} has labels that are not in {file}: {listed(unknown, _SHOWN)}"
            )
        return classes
    for label in sorted(present):
        parts = {part.strip() for part in label.split(SEPARATOR)} - {""}
        if len(parts) > 1 and parts <= present:
            raise DataError(
                f"{source}: expected one label per image, got {label!r}, whose parts are labels "
                "too: for many labels name the column 'labels', and choose --loss bce or asymmetric"
            )
    return sorted(present, key=int) if all(map(str.isdecimal, present)) else sorted(present)


def _find_images(root: Path, split: str, names: Sequence[str], source: Path) -> list[str]:
    """Return the images' paths, which have one folder in common."""
    for name in names:
        if os.path.isabs(name):
            raise DataError(f"{source}: expected paths below {root}, got {name}")
    folder = _folder_of(root, split, names[0], source)
    paths = [_with_suffix(os.path.join(folder, name)) for name in names]
    missing = [name for name, path in zip(names, paths, strict=True) if path is None]
    if missing:
        raise DataError(
            f"{source} lists {len(missing)} images that are not below {folder}, such as "
            f"{listed(missing, _SHOWN)}"
        )
    repeated = [path for path, count in Counter(paths).items() if count > 1]
    if repeated:
        raise DataError(f"{source}: expected every image once, got {repeated[0]} twice")
    return [path for path in paths if path is not None]


def _folder_of(root: Path, split: str, name: str, source: Path) -> Path:
    for folder in (root, root / split):
        if _with_suffix(str(folder / name)) is not None:
            return folder
    others = (each for each in sorted(root.iterdir()) if each.is_dir() and not is_hidden(each.name))
    found = [each for each in others if _with_suffix(str(each / name)) is not None]
    if len(found) == 1:
        return found[0]
    got = f"one in each of {listed(found, _SHOWN)}" if found else "none"
    raise DataError(
        f"{source}: expected the image {name} below {root}, {root / split} or one other folder of "
        f"{root}, got {got}: write paths below {root}"
    )


def _with_suffix(path: str) -> str | None:
    """Return the path of an image, with its suffix if that is missing, or None."""
    if is_image(path):
        return path if os.path.isfile(path) else None
    found = [path + suffix for suffix in EXTENSIONS if os.path.isfile(path + suffix)]
    if len(found) > 1:
        raise DataError(f"expected one image {path}, got {listed(found)}: write the suffix")
    return found[0] if found else None
