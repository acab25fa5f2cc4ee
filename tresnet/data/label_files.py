"""Read files of labels: CSV files, and the JSON files of COCO.

`read_one_label` reads CSV files with one label per image, and `read_csv` those with any number of
labels. All functions return the names of the classes, and the path and the labels of each image.
Errors name the file. Errors in the rows of a CSV file also name the line.
"""

import csv
import json
import re
from collections.abc import Collection
from itertools import compress, dropwhile, permutations
from pathlib import Path
from typing import Any

from tresnet.data.classes import check_unique, composed
from tresnet.errors import DataError, listed

SEPARATOR = ";"
_OTHER_SEPARATORS = (",", "|", "/", "\t", "+", "&", " ")  # " " last: it surrounds others
_CELLS = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}  # as pandas writes them
_INDEX = ("", "Unnamed: 0")  # headers of an index column of pandas
_SHOWN = 5

Listing = list[tuple[str, Collection[str]]]  # each image's relative path and class names


def has_one_label(path: Path) -> bool:
    """Return whether a file begins with a header such as `image,label`; other files may be any."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header = next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        return False
    columns = list(dropwhile(_INDEX.__contains__, map(str.strip, header)))
    return len(columns) == 2 and columns[1].lower() == "label"


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
    while header and header[0] in _INDEX:
        header, rows = header[1:], [(line, row[1:]) for line, row in rows]
    for line, row in rows[1:]:
        if len(row) != len(header):
            raise DataError(f"{path}:{line}: expected {len(header)} cells, got {len(row)}")
    return header, rows[1:]


def read_one_label(path: Path) -> tuple[list[str], Listing]:
    """Return a CSV file's labels, sorted by value if all are numbers, and each image's label."""
    _, rows = read_table(path)
    labels = [composed(row[1].strip()) for _, row in rows]
    for (line, _), label in zip(rows, labels, strict=True):
        if not label:
            raise DataError(f"{path}:{line}: expected a label, got none")
    if all(re.fullmatch(r"\d+\.0", label) for label in labels):  # as pandas writes some integers
        labels = [label.removesuffix(".0") for label in labels]
    classes = sorted(set(labels))
    if all(map(str.isdecimal, classes)):
        classes.sort(key=int)
    return classes, [(row[0], (label,)) for (_, row), label in zip(rows, labels, strict=True)]


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
    check_unique(header, "column", path)
    columns, has_names = header[1:], header[1:] == ["labels"]
    listing: Listing = []
    for line, row in rows:
        if has_names:
            cells = [composed(cell.strip()) for cell in row[1].split(separator or SEPARATOR)]
            listing.append((row[0], set(filter(None, cells))))
            continue
        cells = [cell.strip() for cell in row[1:]]
        if others := [cell for cell in cells if cell.lower() not in _CELLS]:
            raise DataError(
                f"{path}:{line}: expected 0 or 1 for each class, got {others[0]!r}: names of "
                "classes go into one column, 'labels' in the header"
            )
        present = (_CELLS[cell.lower()] for cell in cells)
        listing.append((row[0], set(compress(columns, present))))
    if not has_names:
        return columns, listing
    classes = sorted(all_labels(listing))
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
        parts = {
            label: set(filter(None, map(str.strip, label.split(separator)))) for label in labels
        }
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
        # Python's versions describe wrong types and too many levels in different words.
        other = "values of other types" if isinstance(error, TypeError) else "too many levels"
        words = f"{type(error).__name__}: {error}"
        raise DataError(
            f"{path}: expected lists of images (id, file_name), categories (id, name) and "
            "annotations (image_id, category_id), got "
            f"{words if isinstance(error, ValueError | KeyError) else other}"
        ) from error
    check_unique([key for key, _ in categories], "id in categories", path)
    check_unique([key for key, _ in files], "id in images", path)
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
    check_unique(ordered, "category", path)
    return ordered, [(images[key], labels[key]) for key in images]


def all_labels(listing: Listing) -> set[str]:
    """Return the labels that images have."""
    return {name for _, labels in listing for name in labels}
