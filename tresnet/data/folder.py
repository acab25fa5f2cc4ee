"""Images in class folders, `<root>/<split>/<class>/*.png`, opened with checks that name the fault."""

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tresnet.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

# Fixes the classes, and their order, of a data set with any number of labels an image.
CLASSES_FILE = "classes.txt"
_NAMES_SHOWN = 10


class BadImageError(DataError):
    """One file is truncated, is not an image, or cannot be read.

    Attributes:
        path: the file.
        reason: what the decoder or the system said.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"expected an image, but {self.path} cannot be read ({self.reason}): "
            "replace or delete the file"
        )


class ImageDataset(torch.utils.data.Dataset[tuple[Any, Any]]):
    """One split of a data set: item i is (transformed image, its label or labels).

    Attributes:
        split: "train" or "val".
        classes: class names in label order.
        paths: the image files in index order, as text.
        targets: one label each, (N,) int64; or any number of labels, (N, classes) uint8 of 0 and 1.
        skip_bad_images: whether a loader leaves unreadable files out instead of stopping.
    """

    def __init__(
        self,
        split: str,
        classes: list[str],
        paths: list[str],
        targets: torch.Tensor,
        transform: Callable[["Image"], Any] | None = None,
        skip_bad_images: bool = False,
    ) -> None:
        self.split = split
        self.classes = classes
        self.paths = paths
        self.targets = targets
        self.transform = transform
        self.skip_bad_images = skip_bad_images

    @property
    def multi(self) -> bool:
        """Whether an image may have any number of labels."""
        return self.targets.dim() == 2

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return (image, label); without a transform the image is a PIL image in RGB.

        The label is an int, or (classes,) float32 of 0 and 1.

        Raises:
            BadImageError: the file cannot be decoded, whatever `skip_bad_images` says.
        """
        image = load_rgb(self.paths[index])
        target = self.targets[index]
        label = target.float() if self.multi else int(target)
        return (image if self.transform is None else self.transform(image)), label


def open_folder(
    root: str | Path,
    split: str,
    transform: Callable[["Image"], Any] | None = None,
    skip_bad_images: bool = False,
) -> ImageDataset:
    """Open `<root>/<split>` with one sub-folder of images for each class.

    Labels number the class folders in sorted order; files are in torchvision's order, and those
    whose suffix is not that of an image are ignored, as torchvision does. No image is decoded here:
    a damaged one shows when it is read.

    Args:
        root: folder that holds the splits.
        split: "train" or "val".
        transform: from a PIL image in RGB to what the model takes.
        skip_bad_images: kept on the data set for the loader, which counts and leaves out.

    Raises:
        DataError: the folder is missing, has no class folders, some of them have no image, or a
            symbolic link leads to a folder a second time.
    """
    folder = Path(root) / split
    classes = class_folders(Path(root), folder)
    reached: dict[tuple[int, int], str] = {}
    try:
        files = [list(_image_files(os.path.join(folder, name), reached)) for name in classes]
    except OSError as error:
        raise DataError(f"cannot list the images under {folder}: {error}") from error
    empty = [name for name, found in zip(classes, files, strict=True) if not found]
    if empty:
        raise DataError(
            f"expected images in each of the {len(classes)} class folders of {folder}, but found "
            f"none in: {_shorten(empty)}; add images (jpg, png, ppm, bmp, pgm, tif, webp) or "
            "delete the empty folders"
        )
    paths = [path for found in files for path in found]
    counts = torch.tensor([len(found) for found in files])
    targets = torch.arange(len(classes)).repeat_interleave(counts)
    return ImageDataset(split, classes, paths, targets, transform, skip_bad_images)


def _image_files(folder: str, reached: dict[tuple[int, int], str]) -> Iterator[str]:
    """Yield the images below a folder, also through links, in torchvision's order.

    torchvision itself goes round and round in a loop of links, as deep as the system lets it.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS

    def refuse(error: OSError) -> None:
        raise error

    found = []
    for place, _, names in os.walk(folder, followlinks=True, onerror=refuse):
        status = os.stat(place)
        first = reached.setdefault((status.st_dev, status.st_ino), place)
        if first != place:
            raise DataError(
                f"expected every image in one place, but {place} is the folder {first} again, by a"
                " symbolic link: delete the link"
            )
        found.append((place, names))
    for place, names in sorted(found):
        for name in sorted(names):
            if name.lower().endswith(IMG_EXTENSIONS):
                yield os.path.join(place, name)


def check_same_classes(train: ImageDataset, val: ImageDataset) -> None:
    """Require the same classes in the same order in both splits, so that labels mean the same.

    Raises:
        DataError: names the classes that are in one split only, or both orders.
    """
    what, mend = "class folders", "add the missing folders or delete the others"
    if train.multi:
        what, mend = "classes", f"list all of them in {CLASSES_FILE}"
    pairs = {"train": (train, val), "val": (val, train)}
    only = [
        f"only in {split}: {_shorten(sorted(extra))}"
        for split, (one, other) in pairs.items()
        if (extra := set(one.classes) - set(other.classes))
    ]
    if only:
        raise DataError(f"expected the same {what} in train and val, got {'; '.join(only)}: {mend}")
    if train.classes != val.classes:
        raise DataError(
            f"expected the same order of {what} in train and val, got {_shorten(train.classes)} and"
            f" {_shorten(val.classes)}: {mend}"
        )


def load_rgb(path: str | Path) -> "Image":
    """Decode a whole image file as 8-bit RGB.

    Alpha is dropped and EXIF orientation is not applied, as torchvision and timm do, so that
    accuracies compare with theirs. Grey of 16 bits is scaled to 8 (Pillow would clip it).

    Raises:
        BadImageError: the file is missing, truncated, not an image, or of a pixel type that has
            no defined range (32-bit integers, floats).
    """
    from PIL import Image

    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError("not a regular file")  # opening a FIFO would wait for its writer
        with _strict_decoding(), Image.open(path) as image:
            image.load()
            return _to_rgb(image)
    except Exception as error:  # a decoder fed garbage raises anything: SyntaxError, struct.error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise BadImageError(str(path), reason) from error


def _to_rgb(image: "Image") -> "Image":
    """Convert any decoded image to mode RGB."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        wide = np.asarray(image).astype(np.int64)
        return Image.fromarray(((wide + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(f"pixel type {image.mode!r} has no defined range; save it with 8 bits")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow warns when it goes to RGB in one step
    return image.convert("RGB")


@contextmanager
def _strict_decoding() -> Iterator[None]:
    """Switch off Pillow's process-wide leniency, which pads a truncated image with grey."""
    from PIL import ImageFile

    lenient = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = lenient


def class_folders(root: Path, folder: Path) -> list[str]:
    """Return the names of the class folders in `folder`, a split of `root`, or say what is wrong."""
    layout = f"expected images as {folder}/<class>/<image>"
    if not root.is_dir():
        raise DataError(f"{layout}, but {root} is not a folder: check --data")
    try:
        if not folder.is_dir():
            found = _shorten(sorted(entry.name for entry in root.iterdir())) or "nothing"
            raise DataError(
                f"{layout}, but there is no folder {folder.name!r} in {root}, which holds: {found}"
            )
        classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    except OSError as error:
        raise DataError(f"cannot list {error.filename}: {error.strerror}") from error
    if not classes:
        raise DataError(f"{layout}, but {folder} has no class folders: make one for each class")
    return classes


def _shorten(names: Iterable[str]) -> str:
    """Join names with commas; past the first ten, say how many more there are."""
    names = list(names)
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
