"""Images in class folders, `<root>/<split>/<class>/*.png`, opened with checks that name the fault."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from tresnet.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

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


class HasClasses(Protocol):
    """Anything with a list of class names in label order."""

    classes: list[str]


class ImageDataset(torch.utils.data.Dataset[tuple[Any, int]]):
    """One split of a folder of images: item i is (transformed image, label).

    Labels number the class folders in sorted order, as torchvision's ImageFolder does.

    Attributes:
        split: name of the sub-folder, "train" or "val".
        classes: class names in label order.
        paths: the image files in index order, as text.
        targets: their labels.
        skip_bad_images: whether a loader leaves unreadable files out instead of stopping.
    """

    def __init__(
        self,
        split: str,
        classes: list[str],
        samples: list[tuple[str, int]],
        transform: Callable[["Image"], Any] | None = None,
        skip_bad_images: bool = False,
    ) -> None:
        self.split = split
        self.classes = classes
        self.paths = [path for path, _ in samples]
        self.targets = [label for _, label in samples]
        self.transform = transform
        self.skip_bad_images = skip_bad_images

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """Return (image, label); without a transform the image is a PIL image in RGB.

        Raises:
            BadImageError: the file cannot be decoded, whatever `skip_bad_images` says.
        """
        image = load_rgb(self.paths[index])
        return (image if self.transform is None else self.transform(image)), self.targets[index]

    def describe(self) -> dict[str, Any]:
        """Return split, class names and counts of images: plain values for a run's record."""
        counts = Counter(self.targets)
        return {
            "split": self.split,
            "images": len(self),
            "classes": list(self.classes),
            "images_per_class": [counts[label] for label in range(len(self.classes))],
        }


def open_folder(
    root: str | Path,
    split: str,
    transform: Callable[["Image"], Any] | None = None,
    skip_bad_images: bool = False,
) -> ImageDataset:
    """Open `<root>/<split>` with one sub-folder of images for each class.

    Files whose suffix is not that of an image are ignored, as torchvision does. No image is
    decoded here: a damaged one shows when it is read.

    Args:
        root: folder that holds the splits.
        split: "train" or "val".
        transform: from a PIL image in RGB to what the model takes.
        skip_bad_images: kept on the data set for the loader, which counts and leaves out.

    Raises:
        DataError: the folder is missing, has no class folders, or some of them have no image.
    """
    from torchvision.datasets import ImageFolder

    folder = Path(root) / split
    classes = class_folders(Path(root), folder)
    try:
        listing = ImageFolder(folder, allow_empty=True)
    except OSError as error:
        raise DataError(f"cannot list the images under {folder}: {error}") from error
    counts = Counter(listing.targets)
    empty = [name for label, name in enumerate(listing.classes) if not counts[label]]
    if empty:
        raise DataError(
            f"expected images in each of the {len(classes)} class folders of {folder}, but found "
            f"none in: {_shorten(empty)}; add images (jpg, png, ppm, bmp, pgm, tif, webp) or "
            "delete the empty folders"
        )
    return ImageDataset(split, listing.classes, listing.samples, transform, skip_bad_images)


def check_same_classes(train: HasClasses, val: HasClasses) -> None:
    """Require the same class folders in both splits, so that labels mean the same.

    Raises:
        DataError: names the classes that are in one split only.
    """
    differing = only_in_one(train, val)
    if differing:
        raise DataError(
            f"expected the same class folders in train and val, but found {differing}. Add the "
            "missing folders or delete the others: labels number the folders in order"
        )


def only_in_one(train: HasClasses, val: HasClasses) -> str:
    """Name the classes that are in one split only, for a message; nothing if there are none."""
    only_train = set(train.classes) - set(val.classes)
    only_val = set(val.classes) - set(train.classes)
    return "; ".join(
        f"only in {split}: {_shorten(sorted(names))}"
        for split, names in (("train", only_train), ("val", only_val))
        if names
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
    if not folder.is_dir():
        found = _shorten(sorted(entry.name for entry in root.iterdir())) or "nothing"
        raise DataError(
            f"{layout}, but there is no folder {folder.name!r} in {root}, which holds: {found}"
        )
    try:
        classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    except OSError as error:
        raise DataError(f"cannot list {folder}: {error}") from error
    if not classes:
        raise DataError(f"{layout}, but {folder} has no class folders: make one for each class")
    return classes


def _shorten(names: Iterable[str]) -> str:
    """Join names with commas; past the first ten, say how many more there are."""
    names = list(names)
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
