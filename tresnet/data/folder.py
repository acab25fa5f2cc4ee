"""Open images in class folders, such as `<root>/<split>/<class>/*.png`.

`open_folder` lists classes and files in the order of torchvision's ImageFolder, so that labels and
accuracies are comparable with torchvision's. An `ImageDataset` reads a file only when its item is
requested. Multi-label and Hugging Face data sets are also `ImageDataset`s.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tresnet.data.classes import composed, name_numbers, output_order
from tresnet.data.decoding import EncodedImage, as_bad_image_error, read_image_file
from tresnet.errors import DataError, listed

logger = logging.getLogger(__name__)

# Suffixes of image files, for every command; Pillow reads them all.
EXTENSIONS = (
    *(".apng", ".avif", ".avifs", ".bmp", ".dib", ".gif", ".j2c", ".j2k", ".jfif", ".jp2", ".jpc"),
    *(".jpe", ".jpeg", ".jpf", ".jpg", ".jpx", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".qoi"),
    *(".tga", ".tif", ".tiff", ".webp"),
)
# Name of the file that lists a multi-label data set's classes in order.
CLASSES_FILE = "classes.txt"
_SHOWN = 10


class Paths(Sequence[str]):
    """Paths in one buffer of bytes: reading a list's strings would copy their memory in workers."""

    def __init__(self, paths: Iterable[str]) -> None:
        encoded = [os.fsencode(path) for path in paths]
        self._bytes = np.frombuffer(b"".join(encoded), np.uint8)
        self._ends = np.cumsum([0, *map(len, encoded)])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        index = range(len(self))[index]
        return os.fsdecode(self._bytes[self._ends[index] : self._ends[index + 1]].tobytes())


@dataclass(eq=False, repr=False)
class ImageDataset(torch.utils.data.Dataset[tuple[Any, Any]]):
    """One split of a data set: item i is (transformed image, label).

    Without a transform, the image is a PIL image in RGB. The label is an int, or for multi-label
    data a float32 tensor (classes,) of 0 and 1. `targets` are all labels: (N,), int64, or for
    multi-label data (N, classes), uint8. A file that cannot be decoded raises BadImageError. With
    `skip_bad_images`, a loader skips such files.
    """

    split: str
    classes: list[str]
    paths: Sequence[str]
    targets: torch.Tensor
    transform: Callable[[EncodedImage], Any] | None = None
    skip_bad_images: bool = False
    inferred: bool = False  # whether the classes are the labels that occur in this split
    max_pixels: int | None = None  # limit of an image's pixels; None: Pillow's

    @property
    def digest(self) -> str | None:
        """Hash that identifies the images, or None if their paths and file sizes identify them."""
        return None

    @property
    def numbered(self) -> bool:
        """Whether labels are numbers, without a list of the classes."""
        return self.inferred and all(map(str.isdecimal, self.classes))

    @property
    def multi(self) -> bool:
        """Whether the data set is multi-label: an image may have any number of labels."""
        return self.targets.dim() == 2

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        encoded = self.encoded_image(index)
        with as_bad_image_error(encoded.path, MemoryError):
            image = encoded.rgb() if self.transform is None else self.transform(encoded)
        target = self.targets[index]
        return image, target.float() if self.multi else int(target)

    def encoded_image(self, index: int) -> EncodedImage:
        """Read an image without decoding its pixels; an unreadable file raises BadImageError."""
        return open_image(self.paths[index], self.max_pixels)

    def relabel(self, classes: Sequence[str]) -> None:
        """Make labels indices into `classes`, which have the names of all present classes.

        Where the present classes are numbers and `classes` are names, the numbers are the indices.
        ConfigError is raised if `classes` lack a present class.
        """
        names = self.classes
        # Fewer columns of 0 and 1 than names would have an unknown first name.
        if not self.multi or self.inferred or len(classes) == len(names):
            names = name_numbers(classes, names)
        order = output_order(classes, len(classes), names, subset=True)
        if order is not None and self.multi:
            targets = torch.zeros(len(self), len(classes), dtype=torch.uint8)
            targets[:, order] = self.targets
            self.targets = targets
        elif order is not None:
            self.targets = torch.tensor(order)[self.targets]
        self.classes, self.inferred = list(classes), False


def open_folder(root: str | Path, split: str) -> ImageDataset:
    """Open `<root>/<split>` ("train" or "val") with one sub-folder of images for each class.

    Labels are indices of the sorted class folders. What is hidden (its name begins with a dot) is
    left out, and so are files with a suffix outside `EXTENSIONS`; a warning counts them. DataError
    is raised if the folder is missing, has no class folders, or has a class folder without images.
    """
    folder = Path(root) / split
    folders, left_out = class_folders(Path(root), folder)
    files = [image_files(str(each), left_out) for each in folders]
    classes = [composed(each.name) for each in folders]
    empty = [name for name, images in zip(classes, files, strict=True) if not images]
    if empty:
        raise DataError(
            f"expected images in each of the {len(classes)} class folders of {folder}, but found "
            f"none in: {listed(empty, _SHOWN)}; add images (jpg, png, ppm, bmp, pgm, tif, webp) or "
            "delete the empty folders"
        )
    warn_left_out(folder, left_out)
    paths = Paths(path for images in files for path in images)
    counts = torch.tensor([len(images) for images in files])
    targets = torch.arange(len(classes)).repeat_interleave(counts)
    return ImageDataset(split, classes, paths, targets)


def image_files(folder: str, left_out: Counter[str]) -> list[str]:
    """Return the paths of images below a folder, in the order of ImageFolder.

    `left_out` counts the other files by their suffix, and hidden files and folders. A folder that
    cannot be read, or that contains a link to itself, raises DataError.
    """
    images: list[str] = []
    for path, names in sorted(visible_files(folder, left_out)):
        images += (os.path.join(path, name) for name in sorted(names) if is_image(name))
        others = (os.path.splitext(name)[1] for name in names if not is_image(name))
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


def is_image(name: str) -> bool:
    """Return whether a file of this name is an image, by its suffix."""
    return name.lower().endswith(EXTENSIONS)


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


def align_classes(train: ImageDataset, val: ImageDataset) -> None:
    """Give both splits the classes of `train`, if those of `val` are only the labels that occur.

    DataError is raised if classes or their order differ, or if single-label data have one class.
    """
    if val.inferred:
        if unknown := sorted(set(val.classes) - set(train.classes)):
            raise DataError(
                f"expected only labels in {val.split} that images of {train.split} have (such as "
                f"{listed(train.classes, _SHOWN)}), got also {listed(unknown, _SHOWN)}: leave out "
                "these images, or name another column by --label-column"
            )
        val.relabel(train.classes)
    what, advice = "class folders", "add the missing folders or delete the others"
    if not train.paths:
        what, advice = "classes", "give both label columns one type ClassLabel"
    elif train.multi:
        what, advice = "classes", f"list all of them in {CLASSES_FILE}"
    only = [
        f"only in {split}: {listed(extra, _SHOWN)}"
        for split, one, other in (("train", train, val), ("val", val, train))
        if (extra := sorted(set(one.classes) - set(other.classes)))
    ]
    if train.classes != val.classes:
        orders = [listed(split.classes, _SHOWN) for split in (train, val)]
        raise DataError(
            f"expected the same {'' if only else 'order of '}{what} in train and val, got "
            f"{'; '.join(only or orders)}: {advice}"
        )
    if len(train.classes) < 2 and not train.multi:
        raise DataError(
            f"expected at least two {what} in train and val, got {train.classes[0]}: add another"
        )


def open_image(path: str | Path, max_pixels: int | None = None) -> EncodedImage:
    """Read an image file and parse its header; an unreadable file raises BadImageError."""
    with as_bad_image_error(str(path)):
        data = read_image_file(path)
    return EncodedImage(data, str(path), max_pixels)


def class_folders(root: Path, folder: Path) -> tuple[list[Path], Counter[str]]:
    """Return the class folders in `folder`, a split of `root`, sorted; count other entries.

    DataError is raised if there are none, or if two have one name in Unicode's composed form.
    """
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
    for one, other in pairwise(folders):
        if composed(one.name) == composed(other.name):
            raise DataError(
                f"expected class folders of different names, but two in {folder} are {one.name}, "
                "in two of Unicode's forms: join them"
            )
    others = [entry.name for entry in entries if entry not in folders]
    kinds = ("hidden" if is_hidden(name) else "beside the class folders" for name in others)
    return folders, Counter(kinds)
