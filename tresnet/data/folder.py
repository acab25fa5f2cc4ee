"""Open images in class folders, such as `<root>/<split>/<class>/*.png`.

`open_folder` lists classes and files in the order of torchvision's ImageFolder, so that labels and
accuracies are comparable with torchvision's. An `ImageDataset` reads a file only when its item is
requested. Multi-label and Hugging Face data sets are also `ImageDataset`s.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tresnet.data.decoding import EncodedImage, as_bad_image_error
from tresnet.errors import DataError, listed

# Copied from torchvision, because importing torchvision takes two seconds.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
# Name of the file that lists a multi-label data set's classes in order.
CLASSES_FILE = "classes.txt"
_SHOWN = 10


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

    @property
    def digest(self) -> str | None:
        """Hash that identifies the images, or None if their paths and file sizes identify them."""
        return None

    @property
    def multi(self) -> bool:
        """Whether the data set is multi-label: an image may have any number of labels."""
        return self.targets.dim() == 2

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        encoded = self.encoded_image(index)
        image = encoded.rgb() if self.transform is None else self.transform(encoded)
        target = self.targets[index]
        return image, target.float() if self.multi else int(target)

    def encoded_image(self, index: int) -> EncodedImage:
        """Read an image without decoding its pixels; an unreadable file raises BadImageError."""
        return open_image(self.paths[index])


def open_folder(
    root: str | Path,
    split: str,
    transform: Callable[[EncodedImage], Any] | None = None,
    skip_bad_images: bool = False,
) -> ImageDataset:
    """Open `<root>/<split>` ("train" or "val") with one sub-folder of images for each class.

    Labels are indices of the sorted class folders. Class folders whose names begin with a dot are
    ignored, and so are files with a suffix outside `EXTENSIONS`. A damaged image raises an error
    when it is read, unless `skip_bad_images` lets the loader skip it. DataError is raised if the
    folder is missing, has no class folders, or has a class folder without images.
    """
    folder = Path(root) / split
    classes = class_folders(Path(root), folder)
    files = [list(image_files(os.path.join(folder, name))) for name in classes]
    empty = [name for name, images in zip(classes, files, strict=True) if not images]
    if empty:
        raise DataError(
            f"expected images in each of the {len(classes)} class folders of {folder}, but found "
            f"none in: {listed(empty, _SHOWN)}; add images (jpg, png, ppm, bmp, pgm, tif, webp) or "
            "delete the empty folders"
        )
    paths = [path for images in files for path in images]
    counts = torch.tensor([len(images) for images in files])
    targets = torch.arange(len(classes)).repeat_interleave(counts)
    return ImageDataset(split, classes, paths, targets, transform, skip_bad_images)


def image_files(folder: str) -> Iterator[str]:
    """Yield the paths of images below a folder, in the order and with the errors of `all_files`."""
    return (path for path in all_files(folder) if path.lower().endswith(EXTENSIONS))


def all_files(folder: str) -> Iterator[str]:
    """Yield the files below a folder in the order of ImageFolder, following symbolic links.

    A folder that cannot be read, or that contains a link to itself, raises DataError.
    """

    def raise_data_error(error: OSError) -> None:
        raise DataError(f"cannot list {error.filename}: {error.strerror}") from error

    folders: list[tuple[str, list[str]]] = []
    for path, _, names in os.walk(folder, followlinks=True, onerror=raise_data_error):
        check_no_cycle(path, folder)
        folders.append((path, names))
    for path, names in sorted(folders):
        yield from (os.path.join(path, name) for name in sorted(names))


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


def check_classes(train: ImageDataset, val: ImageDataset) -> None:
    """Raise DataError if classes or their order differ, or if single-label data have one class."""
    what, advice = "class folders", "add the missing folders or delete the others"
    if train.multi:
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


def open_image(path: str | Path) -> EncodedImage:
    """Read an image file and parse its header; an unreadable file raises BadImageError."""
    with as_bad_image_error(str(path)), open(path, "rb", buffering=0) as file:
        data = file.read()
    return EncodedImage(data, str(path))


def class_folders(root: Path, folder: Path) -> list[str]:
    """Return the sorted class folders in `folder`, a split of `root`; raise DataError if none."""
    layout = f"expected images as {folder}/<class>/<image>"
    if not root.is_dir():
        raise DataError(f"{layout}, but {root} is not a folder: check --data")
    try:
        if not folder.is_dir():
            others = listed(sorted(entry.name for entry in root.iterdir()), _SHOWN)
            raise DataError(
                f"{layout}, but there is no folder {folder.name!r} in {root}, which holds: {others}"
            )
        names = (entry.name for entry in folder.iterdir() if entry.is_dir())
        classes = sorted(name for name in names if not name.startswith("."))
    except OSError as error:
        raise DataError(f"cannot list {error.filename}: {error.strerror}") from error
    if not classes:
        raise DataError(f"{layout}, but {folder} has no class folders: make one for each class")
    return classes
