"""Find images in class folders, such as `<root>/<split>/<class>/*.png`.

`read_folder` lists classes and files in the order of torchvision's ImageFolder, so that labels and
accuracies are comparable with torchvision's.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tresnet.data.channels import SUFFIXES
from tresnet.data.labels import RawLabels, composed
from tresnet.errors import DataError, listed

logger = logging.getLogger(__name__)

_SHOWN = 10


def read_folder(root: Path, split: str, suffixes: tuple[str, ...]) -> tuple[list[str], RawLabels]:
    """Return the images in `<root>/<split>` with one sub-folder for each class, and their labels.

    Classes are the sorted folders. What is hidden (its name begins with a dot) is left out, and so
    are files with a suffix outside `suffixes`; a warning counts them. DataError is raised if the
    folder is missing, has no class folders, or has a class folder without images.
    """
    folder = root / split
    layout = f"expected images as {folder}/<class>/<image>"
    if not root.is_dir():
        raise DataError(f"{layout}, but {root} is not a folder: check --data")
    try:
        if not folder.is_dir():
            others = listed(sorted(entry.name for entry in root.iterdir()), _SHOWN)
            raise DataError(
                f"{layout}, but there is no folder {folder.name!r} in {root}, which holds: {others}"
            )
        entries = sorted(folder.iterdir(), key=lambda entry: composed(entry.name))
        folders = [entry for entry in entries if entry.is_dir() and not is_hidden(entry.name)]
    except OSError as error:
        raise DataError(f"cannot list {error.filename}: {error.strerror}") from error
    if not folders:
        raise DataError(f"{layout}, but {folder} has no class folders: make one for each class")
    others = [entry.name for entry in {*entries}.difference(folders)]
    left_out = Counter("hidden" if is_hidden(n) else "beside the class folders" for n in others)
    files = [image_files(str(each), left_out, suffixes) for each in folders]
    classes = [composed(each.name) for each in folders]
    empty = [name for name, images in zip(classes, files, strict=True) if not images]
    if empty:
        kinds = "jpg, png, ppm, bmp, pgm, tif, webp"
        if suffixes != SUFFIXES:
            kinds = ", ".join(suffix[1:] for suffix in suffixes)
        raise DataError(
            f"expected images in each of the {len(classes)} class folders of {folder}, but found "
            f"none in: {listed(empty, _SHOWN)}; add images ({kinds}) or "
            "delete the empty folders"
        )
    warn_left_out(folder, left_out)
    codes = np.repeat(np.arange(len(classes)), [*map(len, files)])
    labels = RawLabels(str(folder), classes, codes, None, classes)
    return [path for images in files for path in images], labels


def image_files(folder: str, left_out: Counter[str], suffixes: tuple[str, ...]) -> list[str]:
    """Return the paths of images below a folder, in the order of ImageFolder.

    `left_out` counts the other files by their suffix, and hidden files and folders. A folder that
    cannot be read, or that contains a link to itself, raises DataError.
    """
    images: list[str] = []
    for path, names in sorted(visible_files(folder, left_out)):
        found = [name for name in sorted(names) if name.lower().endswith(suffixes)]
        images += (os.path.join(path, name) for name in found)
        others = (os.path.splitext(name)[1] for name in {*names}.difference(found))
        left_out.update(suffix or "without suffix" for suffix in others)
    return images


def visible_files(folder: str, left_out: Counter[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder below `folder` with its files, following links; count what is hidden."""

    def raise_data_error(error: OSError) -> None:
        raise DataError(f"cannot list {error.filename}: {error.strerror}") from error

    for path, folders, names in os.walk(folder, followlinks=True, onerror=raise_data_error):
        check_no_cycle(path, folder)
        left_out["hidden"] += sum(map(is_hidden, folders + names))
        folders[:] = [name for name in folders if not is_hidden(name)]
        yield path, [name for name in names if not is_hidden(name)]


def is_hidden(name: str) -> bool:
    """Return whether all commands leave out files and folders of this name."""
    return name.startswith(".")


def warn_left_out(folder: object, left_out: Counter[str]) -> None:
    """Log what was left out of a folder, in the first process of a run."""
    if left_out.total() and os.environ.get("RANK", "0") == "0":
        most = sorted((+left_out).items(), key=lambda item: (-item[1], item[0]))
        counts = listed((f"{count} {kind}" for kind, count in most), _SHOWN)
        logger.warning("left out %d files in %s: %s", left_out.total(), folder, counts)


def check_no_cycle(path: str, root: str) -> None:
    """Raise DataError if the path from `root` to `path` enters a folder twice by symbolic links."""
    visited: dict[str, Path] = {}
    for folder in (Path(path), *Path(path).parents):
        if not folder.is_relative_to(root):
            return
        below = visited.setdefault(os.path.realpath(folder), folder)
        if below != folder:
            raise DataError(
                f"expected folders without a cycle, but {below} is {folder} again, by a symbolic "
                "link: remove the link"
            )
