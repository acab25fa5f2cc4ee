"""Open images whose labels a file lists: one label each, or any number.

Kaggle's competitions have such files. The images may lie anywhere below the data's directory.
"""

import os
import unicodedata
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from tresnet.data.classes import check_unique, composed, read_names
from tresnet.data.folder import (
    CLASSES_FILE,
    EXTENSIONS,
    ImageDataset,
    Paths,
    is_hidden,
    is_image,
    visible_files,
)
from tresnet.data.label_files import (
    SEPARATOR,
    all_labels,
    has_one_label,
    read_coco,
    read_csv,
    read_one_label,
)
from tresnet.errors import DataError, listed

_SHOWN = 5


def open_listing(
    root: Path,
    split: str,
    *,
    multi: bool,
    separator: str | None = None,
    known: Collection[str] = (),
) -> ImageDataset:
    """Open a split whose images are listed in the file that `label_file` finds.

    A CSV file's first column has image paths below `root`, below `<root>/<split>`, or below one
    other folder of `root`; a suffix such as .jpg may be missing. Then comes a column `label`. If
    `multi`, a column `labels` has names separated by `separator` (";"), or each class has a column
    of 0 and 1. In COCO's JSON, `file_name` is relative to `<root>/<split>`.
    `<root>/classes.txt`, one name per line, fixes the classes and their order. Without this file,
    they are the sorted labels (by value if all are numbers), the columns, or COCO's categories
    sorted by id. `read_csv` explains `known`. DataError is raised if a label or an image is
    missing, or if the file is malformed or empty.
    """
    source = label_file(root, split, multi)
    if source is None:
        paths = [path.relative_to(root).as_posix() for path in _label_files(root, split, multi)]
        raise DataError(
            f"expected labels in one of {listed(paths)} below {root}, got none: check --data"
        )
    own = root / CLASSES_FILE
    names = read_names(own) if own.is_file() else []
    folders = [root, root / split]
    if source.suffix == ".json":
        folders, (classes, listing) = [root / split], read_coco(source)
    elif multi:
        classes, listing = read_csv(source, separator, {*known, *names})
    else:
        classes, listing = read_one_label(source)
    if not listing:
        raise DataError(f"expected images in {source}, but it lists none")
    if unknown := sorted(all_labels(listing) - set(names)) if names else []:
        raise DataError(f"{source} has labels that are not in {own}: {listed(unknown, _SHOWN)}")
    if not names and not multi:
        _check_single(classes, source)
    classes = names or classes
    if not classes:
        raise DataError(f"expected labels in {source}, but no image has any")
    paths = _find_images(root, folders, [path.strip() for path, _ in listing], source)
    index = {name: number for number, name in enumerate(classes)}
    if multi:
        targets = torch.zeros(len(paths), len(classes), dtype=torch.uint8)
        for row, (_, labels) in enumerate(listing):
            targets[row, [index[name] for name in labels]] = 1
    else:
        targets = torch.tensor([index[label] for _, (label,) in listing])
    return ImageDataset(split, classes, Paths(paths), targets, inferred=not (multi or names))


def label_file(root: Path, split: str, multi: bool) -> Path | None:
    """Return the path of the file that lists a split's labels, or None if there is none.

    The file is `<root>/<split>.csv`. If `multi`, it may also be `<root>/<split>.json` or
    `<root>/annotations/instances_<split>.json`, in COCO's format. Without `multi`, a CSV file of
    other columns is none. DataError is raised if class folders hold other classes than the file.
    """
    path = next(filter(Path.is_file, _label_files(root, split, multi)), None)
    if path is None or multi:
        return path
    folders = _class_folders(root / split) if has_one_label(path) else None
    if not folders:
        return None if folders is None else path
    labels = all_labels(read_one_label(path)[1])
    if labels == folders:
        return None  # the folders say the same
    raise DataError(
        f"{root / split} has class folders ({listed(sorted(folders), _SHOWN)}), and {path} lists "
        f"the labels {listed(sorted(labels), _SHOWN)}: rename the file to read the folders, or "
        "move the images out of folders to read the file"
    )


def _label_files(root: Path, split: str, multi: bool) -> list[Path]:
    coco = root / "annotations" / f"instances_{split}.json"
    return [root / f"{split}.csv", *([root / f"{split}.json", coco] if multi else [])]


def _class_folders(folder: Path) -> set[str]:
    found = visible_files(str(folder), Counter()) if folder.is_dir() else ()
    with_images = [Path(path) for path, names in found if any(map(is_image, names))]
    parts = (path.relative_to(folder).parts for path in with_images)
    return {composed(first) for first, *_ in filter(None, parts)}


def _check_single(labels: Sequence[str], source: Path) -> None:
    for label in labels:
        parts = {part.strip() for part in label.split(SEPARATOR)} - {""}
        if len(parts) > 1 and parts <= set(labels):
            raise DataError(
                f"{source}: expected one label per image, got {label!r}, whose parts are labels "
                "too: for many labels name the column 'labels', and choose --loss bce or asymmetric"
            )


def _find_images(
    root: Path, folders: Sequence[Path], names: Sequence[str], source: Path
) -> list[str]:
    """Return the images' paths, which have one folder in common."""
    for name in names:
        if os.path.isabs(name):
            raise DataError(f"{source}: expected paths below {root}, got {name}")
    folder = folders[0] if len(folders) == 1 else _folder_of(root, folders, names[0], source)
    found = {name: _existing(os.path.join(folder, name)) for name in names}
    if missing := [name for name, path in found.items() if path is None]:
        raise DataError(
            f"{source} lists {len(missing)} images that are not below {folder}, such as "
            f"{listed(missing, _SHOWN)}"
        )
    paths = [path for name in names if (path := found[name]) is not None]
    check_unique(paths, "image", source)
    return paths


def _folder_of(root: Path, folders: Sequence[Path], name: str, source: Path) -> Path:
    for folder in folders:
        if _existing(str(folder / name)) is not None:
            return folder
    others = (each for each in sorted(root.iterdir()) if each.is_dir() and not is_hidden(each.name))
    found = [each for each in others if _existing(str(each / name)) is not None]
    if len(found) == 1:
        return found[0]
    got = f"one in each of {listed(found, _SHOWN)}" if found else "none"
    raise DataError(
        f"{source}: expected the image {name} below {listed(folders)} or one other folder of "
        f"{root}, got {got}: write paths below {root}"
    )


def _existing(path: str) -> str | None:
    """Return the path of a file, with its suffix if that is missing, or None.

    The path may be in another of Unicode's forms than the file's name.
    """
    forms = () if path.isascii() else (unicodedata.normalize(form, path) for form in ("NFC", "NFD"))
    for form in (path, *forms):
        if os.path.isfile(form):
            return form
        found = [form + suffix for suffix in EXTENSIONS if os.path.isfile(form + suffix)]
        if len(found) > 1:
            raise DataError(f"expected one image {form}, got {listed(found)}: write the suffix")
        if found:
            return found[0]
    return None
