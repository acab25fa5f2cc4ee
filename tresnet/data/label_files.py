"""Read files that list images and their labels: CSV files, and the JSON files of COCO.

Kaggle's competitions have such files: with one label for each image, or with any number. The images
may lie anywhere below the data's directory. Errors name the file, and the line of a CSV file.
"""

import csv
import functools
import json
import logging
import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import compress, dropwhile, islice
from pathlib import Path
from typing import Any

from tresnet.data.folder import is_hidden, visible_files
from tresnet.data.labels import CLASSES_FILE, RawLabels, check_unique, composed, read_names
from tresnet.errors import DataError, listed
from tresnet.settings import DataOptions

logger = logging.getLogger(__name__)

SEPARATOR = ";"
_CELLS = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}  # as pandas writes them
_INDEX = ("", "Unnamed: 0")  # headers of an index column of pandas
_SHOWN = 5

Listing = Sequence[tuple[str, Collection[str]]]  # each image's path and class names


def read_listing(
    root: Path,
    split: str,
    source: Path | None,
    options: DataOptions,
    multi: bool,
    suffixes: tuple[str, ...],
) -> tuple[list[str], RawLabels]:
    """Return the images that `source`, the file of `label_file`, lists, and their labels.

    A CSV file's first column has image paths below `root`, below `<root>/<split>`, or below one
    other folder of `root`; one of the `suffixes` may be missing. Then comes a column `label`. If
    `multi`, a column `labels` has names separated by `label_separator`, or each class has a column
    of 0 and 1. In COCO's JSON, `file_name` is relative to `<root>/<split>`.
    `<root>/classes.txt`, one name per line, lists the classes in order; otherwise the columns do,
    or COCO's categories sorted by id. DataError is raised if a label or an image is missing, or if
    the file is malformed or empty.
    """
    if source is None:
        paths = [path.relative_to(root).as_posix() for path in _label_files(root, split, multi)]
        raise DataError(
            f"expected labels in one of {listed(paths)} below {root}, got none: check --data"
        )
    classes, listing, reading = read_file(source, multi, options.label_separator)
    folders = [root / split] if source.suffix == ".json" else [root, root / split]
    names, rows = [path.strip() for path, _ in listing], [labels for _, labels in listing]
    if (own := root / CLASSES_FILE).is_file():
        classes = read_names(own)
    elif not multi:
        _check_single(source, {label for (label,) in rows})
    labels = RawLabels.of(str(source), rows, multi, classes, reading)
    images = _find_images(root, folders, names, source, options.outside_paths, suffixes)
    return images, labels


def read_file(
    source: Path, multi: bool, separator: str | None
) -> tuple[list[str] | None, Listing, str]:
    """Return the classes that a file lists, if any, its images, and how it was read by a guess."""
    reading = ""
    if source.suffix == ".json":
        classes, listing = _read_coco(source)
    elif multi:
        classes, listing = _read_csv(source, separator or SEPARATOR)
        reading = "" if classes else f"labels split at {separator or SEPARATOR!r}"
    else:
        classes, listing = None, _read_one_label(source)
    if not listing:
        raise DataError(f"expected images in {source}, but it lists none")
    return classes, listing, reading


def label_file(root: Path, split: str, multi: bool, suffixes: tuple[str, ...]) -> Path | None:
    """Return the path of the file that lists a split's labels, or None if there is none.

    The file is `<root>/<split>.csv`. If `multi`, it may also be `<root>/<split>.json` or
    `<root>/annotations/instances_<split>.json`, in COCO's format. Without `multi`, a CSV file of
    other columns is none, nor is one beside class folders, which are read: a warning counts images
    in only one of the two. DataError is raised if an image of both has another label in the file.
    """
    path = next(filter(Path.is_file, _label_files(root, split, multi)), None)
    if path is None or multi:
        return path
    try:
        header = read_header(path)
    except DataError:
        return None
    if len(header) != 2 or header[1].lower() != "label":
        return None
    classes = dict[str, str]()  # of each image, by its path in the split and by its name alone
    for folder, images in image_folders(root / split, suffixes):
        for image in (_without_suffix(each, suffixes) for each in images):
            name = image.rpartition("/")[2]
            classes[image] = folder
            classes[name] = folder if classes.get(name, folder) == folder else ""  # "": of several
    if not (folders := {*classes.values()} - {""}):
        return path
    both, rows = set[str](), _read_one_label(path)
    for image, (label,) in rows:
        key = name = _without_suffix(image, suffixes)
        while key not in classes and "/" in key:
            key = key.partition("/")[2]
        by_name_alone = "/" not in key and not folders.isdisjoint(name.split("/")[:-1])
        if by_name_alone or not (folder := classes.get(key)):
            continue
        if folder != label:
            raise DataError(
                f"{root / split} has class folders ({listed(sorted(folders), _SHOWN)}), but {path} "
                f"gives {image} the label {label}: rename the file to read the folders, or move the"
                " images out of folders to read the file"
            )
        both.add(key)
    counts = sum("/" in key for key in classes) - len(both), len(rows) - len(both)
    if any(counts) and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "%s is read, not %s: %d images are only in the folders, %d only in the file",
            *(root / split, path, *counts),
        )
    return None


def _label_files(root: Path, split: str, multi: bool) -> list[Path]:
    coco = root / "annotations" / f"instances_{split}.json"
    return [root / f"{split}.csv", *([root / f"{split}.json", coco] if multi else [])]


def image_folders(folder: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    """Yield the class of each folder in `folder` that has images, and their paths in `folder`."""
    for path, names in visible_files(str(folder), Counter()) if folder.is_dir() else ():
        parts = Path(path).relative_to(folder).parts
        if parts and (images := [name for name in names if name.lower().endswith(suffixes)]):
            yield composed(parts[0]), ["/".join((*parts, name)) for name in images]


def _without_suffix(path: str, suffixes: tuple[str, ...]) -> str:
    """Return an image's path with slashes, and without its suffix, if it has one."""
    stem, suffix = os.path.splitext(name := composed(path.strip().replace("\\", "/")))
    return stem if suffix.lower() in suffixes else name


# -- formats ----------------------------------------------------------------------------------


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and cells of each row of a CSV file that is not blank."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            yield from ((reader.line_num, row) for row in reader if row)
    except UnicodeDecodeError as error:
        raise DataError(f"cannot read the labels in {path}: {error}: save it as UTF-8") from error
    except (OSError, csv.Error) as error:
        raise DataError(f"cannot read the labels in {path}: {error}") from error


def read_header(path: Path) -> list[str]:
    """Return the names of a CSV file's columns, without an index column of pandas."""
    _, header = next(_rows(path), (0, []))
    return list(dropwhile(_INDEX.__contains__, (composed(name.strip()) for name in header)))


def read_table(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return a CSV file's header, and the line number and cells of each row.

    An index column of pandas and blank lines are left out. DataError is raised if the file cannot
    be read, or if a row has more or fewer cells than the header.
    """
    header, rows = read_header(path), list(_rows(path))
    index = len(rows[0][1]) - len(header) if rows else 0
    rows = [(line, row[index:]) for line, row in rows[1:]]
    for line, row in rows:
        if len(row) != len(header):
            raise DataError(
                f"{path}:{line}: expected {len(header)} cells, as in the header "
                f"{','.join(header)!r:.80}, got {len(row)}"
            )
    return header, rows


def _read_one_label(path: Path) -> Listing:
    """Return the path and the only label of each image in a file with the header `image,label`."""
    _, rows = read_table(path)
    for line, row in rows:
        if not row[1].strip():
            raise DataError(f"{path}:{line}: expected a label, got none")
    return [(row[0], (composed(row[1].strip()),)) for _, row in rows]


def _check_single(source: Path, labels: set[str]) -> None:
    for label in sorted(labels):
        parts = {part.strip() for part in label.split(SEPARATOR)} - {""}
        if len(parts) > 1 and parts <= labels:
            raise DataError(
                f"{source}: expected one label per image, got {label!r}, whose parts are labels "
                "too: for many labels name the column 'labels', and choose --loss bce or asymmetric"
            )


def _read_csv(path: Path, separator: str) -> tuple[list[str] | None, Listing]:
    """Return the classes that a CSV file's header lists, if any, and each image's classes."""
    header, rows = read_table(path)
    expected = "a header line 'image,labels' or 'image,CLASS,CLASS,...'"
    if len(header) < 2 or not all(header[1:]):
        raise DataError(
            f"{path}: expected {expected}, with commas between the cells, got {','.join(header)!r}"
        )
    if len(header) == 2 and header[1].lower() == "label":
        raise DataError(
            f"{path}: the header {','.join(header)!r} is for one label per image: choose --loss "
            "cross-entropy (in eval.py --labels single), or name the column 'labels' for any number"
        )
    check_unique(header, "column", path)
    if header[1:] == ["labels"]:
        return None, [(row[0], _names(row[1], separator, path)) for _, row in rows]
    listing: list[tuple[str, Collection[str]]] = []
    for line, row in rows:
        cells = [cell.strip().lower() for cell in row[1:]]
        if others := [cell for cell in row[1:] if cell.strip().lower() not in _CELLS]:
            raise DataError(
                f"{path}:{line}: expected {expected} with 0 or 1 for each class, got "
                f"{','.join(header)!r:.80} and {others[0]!r}: names of classes go into one column, "
                "'labels' in the header"
            )
        listing.append((row[0], list(compress(header[1:], map(_CELLS.__getitem__, cells)))))
    return header[1:], listing


def _names(cell: str, separator: str, path: Path) -> Collection[str]:
    if cell[:1] + cell[-1:] == "[]":
        raise DataError(
            f"{path}: expected names of classes separated by {separator!r}, got the list {cell}: "
            f"write name{separator}name"
        )
    return dict.fromkeys(name for part in cell.split(separator) if (name := composed(part.strip())))


def _named(name: object) -> str:
    if name is None or not str(name).strip():
        raise ValueError(f"a category whose name is {name!r}")
    return composed(str(name))


def _read_coco(path: Path) -> tuple[list[str], Listing]:
    """Return a COCO file's category names, sorted by id, and each image's path and labels."""
    try:
        content = json.loads(path.read_text("utf-8-sig"))
        categories = [(one["id"], _named(one["name"])) for one in content["categories"]]
        files = [(one["id"], str(one["file_name"])) for one in content["images"]]
        pairs = {(one["image_id"], one["category_id"]): 0 for one in content["annotations"]}
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
    labels: dict[Any, list[str]] = {image: [] for image in images}
    for image, category in pairs:
        if image not in images or category not in names:
            raise DataError(
                f"{path}: an annotation names image {image!r} and category {category!r}, which are "
                "not both listed"
            )
        labels[image].append(names[category])
    if len({type(key) for key in names}) > 1:
        raise DataError(f"{path}: expected numbers or texts as ids of categories, got both")
    ordered = [names[key] for key in sorted(names)]
    check_unique(ordered, "category", path)
    return ordered, [(images[key], labels[key]) for key in images]


# -- images -----------------------------------------------------------------------------------


def _find_images(
    root: Path,
    folders: Sequence[Path],
    names: Sequence[str],
    source: Path,
    outside: bool,
    suffixes: tuple[str, ...],
) -> list[str]:
    """Return the images' paths, which have one of `folders`, or another of `root`, in common."""
    away = None if outside else next(filter(os.path.isabs, names), None)
    names_in = functools.cache(lambda folder: _names_in(folder, suffixes))
    find = functools.cache(lambda path: _existing(path, names_in))
    folder = folders[0]
    if len(folders) > 1 and away is None:
        found = list(islice((f for f in folders if find(_joined(f, names[0]))), 1))
        if not found:
            others = (e for e in sorted(root.iterdir()) if e.is_dir() and not is_hidden(e.name))
            found = [each for each in others if find(_joined(each, names[0]))]
        if len(found) != 1:
            got = f"one in each of {listed(found, _SHOWN)}" if found else "none"
            raise DataError(
                f"{source}: expected the image {names[0]} below {listed(folders)} or one other "
                f"folder of {root}, got {got}: write paths below {root}, with / between folders"
            )
        folder = found[0]
    paths = [_joined(folder, name) for name in names]
    top = os.path.join(os.path.abspath(root), "")
    if not outside and away is None:
        away = next((p for p in paths if not os.path.abspath(p).startswith(top)), None)
    if away is not None:
        raise DataError(
            f"{source}: expected paths below {root}, got {away}: move the images there, or if "
            "you trust the file, add --outside-paths"
        )
    images = [path for path in map(find, paths) if path is not None]
    if missing := [name for name, path in zip(names, paths, strict=True) if find(path) is None]:
        raise DataError(
            f"{source} lists {len(missing)} images that are not below {folder}, such as "
            f"{listed(missing, _SHOWN)}"
        )
    check_unique(images, "image", source)
    return images


def _joined(folder: Path, name: str) -> str:
    """Return a path without "..", which would leave a folder that is a symbolic link."""
    return os.path.normpath(os.path.join(folder, name))


def _existing(path: str, names_in: Callable[[str], dict[str, list[str]]]) -> str | None:
    """Return the path of a file, or of an image of this name with a suffix; None if there is none.

    Suffixes are compared without case, and names without regard to Unicode's form.
    """
    if os.path.isfile(path):
        return path
    folder, name = os.path.split(path)
    stem, suffix = os.path.splitext(name := composed(name))
    forms = (unicodedata.normalize(form, folder) for form in ("NFC", "NFD"))
    for place in dict.fromkeys((folder, *forms)):
        names = names_in(place or os.curdir)
        found = names.get(name) or names.get(stem + suffix.lower()) or []
        if len(found) > 1:
            raise DataError(f"expected one image {path}, got {listed(found)}: write the suffix")
        if found:
            return os.path.join(place, found[0])
    return None


def _names_in(folder: str, suffixes: tuple[str, ...]) -> dict[str, list[str]]:
    """Return a folder's images by their names without suffix, and with it in lower case."""
    names = defaultdict[str, list[str]](list)
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        if name.lower().endswith(suffixes):
            stem, suffix = os.path.splitext(composed(name))
            for key in (stem, stem + suffix.lower()):
                names[key].append(name)
    return names
