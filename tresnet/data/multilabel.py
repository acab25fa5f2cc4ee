"""Open images that may have several labels, listed in a CSV file or in COCO's JSON format.

`read_csv` and `read_coco` return the names of all classes, and the path and classes of each image.
`open_multilabel` opens such a file as an `ImageDataset`, in which an image's label is a vector of 0
and 1. Errors name the file. Errors in the rows of a CSV file also name the line.
"""

import csv
import json
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import torch

from tresnet.data.classes import composed, read_names
from tresnet.data.decoding import EncodedImage
from tresnet.data.folder import CLASSES_FILE, ImageDataset, Paths
from tresnet.errors import DataError, listed

SEPARATOR = ";"
_OTHER_SEPARATORS = (",", "|", "/", "\t", "+", "&", " ")  # " " last: it surrounds others
_CELLS = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}  # as pandas writes them
INDEX = ("", "Unnamed: 0")  # headers of an index column of pandas
_SHOWN = 5

Listing = list[tuple[str, set[str]]]  # each image's relative path and class names


def open_multilabel(
    root: str | Path,
    split: str,
    transform: Callable[[EncodedImage], Any] | None = None,
    skip_bad_images: bool = False,
    separator: str | None = None,
    known: Collection[str] = (),
) -> ImageDataset:
    """Open one split ("train" or "val") of a multi-label data set.

    The labels are in `<root>/<split>.csv`, or in COCO's format in `<root>/<split>.json` or
    `<root>/annotations/instances_<split>.json`. A CSV's first column has image paths relative to
    `<root>`. Then comes a column `labels`, with names separated by `separator` (";"), or a column
    per class, with 0 or 1. In JSON, `file_name` is relative to `<root>/<split>`, as in COCO.
    `<root>/classes.txt`, one name per line, fixes the classes and their order. Without this file, a
    CSV's classes are its columns of 0 and 1, or the sorted names in its column `labels`. COCO's
    classes are the categories sorted by id. `read_csv` explains `known`. DataError is raised if the
    labels are missing, malformed or empty, or if a listed image does not exist.
    """
    root = Path(root)
    source = label_file(root, split)
    if source is None:
        paths = [path.relative_to(root).as_posix() for path in _label_files(root, split)]
        raise DataError(
            f"expected labels in one of {listed(paths)} below {root}, got none: check --data"
        )
    names = read_names(root / CLASSES_FILE) if (root / CLASSES_FILE).is_file() else []
    if source.suffix == ".csv":
        folder, (classes, listing) = root, read_csv(source, separator, {*known, *names})
    else:
        folder, (classes, listing) = root / split, read_coco(source)
    if not listing:
        raise DataError(f"expected images in {source}, but it lists none")
    if unknown := sorted(_labels(listing) - set(names)) if names else []:
        raise DataError(
            f"{source} has labels that are not in {root / CLASSES_FILE}: {listed(unknown, _SHOWN)}"
        )
    classes = names or classes
    if not classes:
        raise DataError(f"expected labels in {source}, but no image has any")
    absolute = next((path for path, _ in listing if Path(path).is_absolute()), None)
    if absolute is not None:
        raise DataError(f"{source}: expected paths below {folder}, got {absolute}")
    paths = [_present_form(str(folder / path)) for path, _ in listing]
    _check_files(paths, source)
    class_index = {name: index for index, name in enumerate(classes)}
    targets = torch.zeros(len(paths), len(classes), dtype=torch.uint8)
    for row, (_, labels) in enumerate(listing):
        targets[row, [class_index[name] for name in labels]] = 1
    return ImageDataset(split, classes, Paths(paths), targets, transform, skip_bad_images)


def label_file(root: Path, split: str) -> Path | None:
    """Return the path of a split's label file, or None if no such file exists."""
    return next(filter(Path.is_file, _label_files(root, split)), None)


def _label_files(root: Path, split: str) -> list[Path]:
    coco = root / "annotations" / f"instances_{split}.json"
    return [root / f"{split}.csv", root / f"{split}.json", coco]


def read_table(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return a CSV file's header, and the line number and cells of each row.

    An index column of pandas and blank lines are left out. DataError is raised if the file cannot
    be read, or if a row has more or fewer cells than the header.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            rows = [(reader.line_num, row) for row in reader if row]  # skips blank lines
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read the labels in {path}: {error}") from error
    header = [composed(name.strip()) for name in rows[0][1]] if rows else []
    while header and header[0] in INDEX:
        header, rows = header[1:], [(line, row[1:]) for line, row in rows]
    for line, row in rows[1:]:
        if len(row) != len(header):
            raise DataError(f"{path}:{line}: expected {len(header)} cells, got {len(row)}")
    return header, rows[1:]


def read_csv(
    path: Path, separator: str | None = None, known: Collection[str] = ()
) -> tuple[list[str], Listing]:
    """Return a CSV file's class names, and each image's path and labels.

    Without `separator`, names are separated by semicolons. A file without semicolons, in which
    another separator would give names that are also labels by themselves, then raises DataError,
    unless all labels are `known` names of classes.
    """
    header, rows = read_table(path)
    if len(header) < 2 or not all(header[1:]):
        raise DataError(
            f"{path}: expected a header line 'image,labels' or 'image,CLASS,CLASS,...', got "
            f"{','.join(header)!r}"
        )
    if len(header) == 2 and header[1].lower() == "label":
        raise DataError(
            f"{path}: the header {','.join(header)!r} is for one label per image: choose --loss "
            "cross-entropy (in eval.py --labels single), or name the column 'labels' for any number"
        )
    _check_unique(header, "column", path)
    columns, has_names = header[1:], header[1:] == ["labels"]
    listing: Listing = []
    for line, row in rows:
        if has_names:
            cells = [composed(cell.strip()) for cell in row[1].split(separator or SEPARATOR)]
            listing.append((row[0], set(filter(None, cells))))
            continue
        values = [_CELLS.get(cell.strip().lower()) for cell in row[1:]]
        if None in values:
            raise DataError(
                f"{path}:{line}: expected 0 or 1 for each class, got "
                f"{row[1 + values.index(None)].strip()!r}: names of classes go into one column, "
                "'labels' in the header"
            )
        listing.append(
            (row[0], {name for name, value in zip(columns, values, strict=True) if value})
        )
    if not has_names:
        return columns, listing
    classes = sorted(_labels(listing))
    one_each = all(SEPARATOR not in row[1] for _, row in rows)
    if separator is None and one_each and not set(classes) <= set(known):
        _check_separator(classes, path)
    return classes, listing


def _check_separator(labels: list[str], path: Path) -> None:
    """Raise DataError if another separator gives names that are also labels by themselves."""
    if lists := [label for label in labels if label[0] + label[-1] == "[]"]:
        raise DataError(
            f"{path}: expected names of classes separated by {SEPARATOR!r}, got the list "
            f"{lists[0]}: write name{SEPARATOR}name"
        )
    for separator in _OTHER_SEPARATORS:
        parts = {label: _parts(label, separator) for label in labels}
        joined = [label for label in labels if len(parts[label]) > 1]
        sets = [parts[label] for label in joined]
        names = sorted(set().union(*parts.values()))
        of_labels = any(each <= set(labels) for each in sets)
        # Also lists such as "clear primary" and "clear primary water", whose names never are alone.
        fewer = len(names) < len(labels)
        if of_labels or (fewer and any(one <= other for one, other in permutations(sets, 2))):
            raise DataError(
                f"{path}: expected names of classes separated by {SEPARATOR!r}, got labels such "
                f"as {joined[0]!r}: {len(labels)} classes ({listed(labels, _SHOWN)}) by "
                f"--label-separator {SEPARATOR!r}, or {len(names)} classes "
                f"({listed(names, _SHOWN)}) by --label-separator {separator!r}; choose one"
            )


def _parts(label: str, separator: str) -> set[str]:
    return set(filter(None, map(str.strip, label.split(separator))))


def read_coco(path: Path) -> tuple[list[str], Listing]:
    """Return a COCO file's category names, sorted by id, and each image's path and labels."""
    try:
        content = json.loads(path.read_text("utf-8-sig"))
        categories = [(one["id"], composed(str(one["name"]))) for one in content["categories"]]
        files = [(one["id"], str(one["file_name"])) for one in content["images"]]
        pairs = {(one["image_id"], one["category_id"]) for one in content["annotations"]}
        names, images = dict(categories), dict(files)
    except OSError as error:
        raise DataError(f"cannot read the labels in {path}: {error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{path}: expected lists of images (id, file_name), categories (id, name) and "
            f"annotations (image_id, category_id), got {type(error).__name__}: {error}"
        ) from error
    _check_unique([key for key, _ in categories], "id in categories", path)
    _check_unique([key for key, _ in files], "id in images", path)
    labels: dict[Any, set[str]] = {image: set() for image in images}
    for image, category in pairs:
        if image not in images or category not in names:
            raise DataError(
                f"{path}: an annotation names image {image!r} and category {category!r}, which are "
                "not both listed"
            )
        labels[image].add(names[category])
    if len({type(key) for key in names}) > 1:
        raise DataError(f"{path}: expected numbers or texts as ids of categories, got both")
    ordered = [names[key] for key in sorted(names)]
    _check_unique(ordered, "category", path)
    return ordered, [(images[key], labels[key]) for key in images]


def _check_unique(values: Sequence[Any], what: str, path: Path) -> None:
    repeated = [str(value) for value, count in Counter(values).items() if count > 1]
    if repeated:
        raise DataError(
            f"{path}: expected every {what} once, got {', '.join(repeated[:_SHOWN])} twice"
        )


def _labels(listing: Listing) -> set[str]:
    return {name for _, labels in listing for name in labels}


def _present_form(path: str) -> str:
    """Return a path in the Unicode form in which the file exists, or as it is if none exists."""
    if path.isascii() or os.path.exists(path):
        return path
    forms = (unicodedata.normalize(form, path) for form in ("NFC", "NFD"))
    return next(filter(os.path.exists, forms), path)


def _check_files(paths: Sequence[str], source: Path) -> None:
    _check_unique(paths, "image", source)
    missing = [path for path in paths if not Path(path).is_file()]
    if missing:
        raise DataError(
            f"{source} lists {len(missing)} images that are not there, such as "
            f"{', '.join(missing[:_SHOWN])}"
        )


def write_csv(path: Path, classes: Sequence[str], images: Mapping[str, Sequence[int]]) -> None:
    """Write a CSV file with a column per class; `images` maps each path to its zeros and ones."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["image", *classes])
        writer.writerows([path, *labels] for path, labels in images.items())
