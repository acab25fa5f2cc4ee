"""A split of a data set: where its images are, their labels, and what is done with an image."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tresnet.data.channels import RGB, ImageReader
from tresnet.data.decoding import EncodedImage, as_bad_image_error
from tresnet.data.labels import Labels

if TYPE_CHECKING:
    from tresnet.data.hf import ArrowImages


class Paths(Sequence[str]):
    """Image files. Paths are in one buffer, because reading a list's strings copies their memory.

    In a list, each worker that reads a string changes its reference count, so that the system
    copies the memory that workers share.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        encoded = [os.fsencode(path) for path in paths]
        self._bytes = np.frombuffer(b"".join(encoded), np.uint8)  # which workers map
        self._ends = np.cumsum([0, *map(len, encoded)])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        index = range(len(self))[index]
        return os.fsdecode(self._bytes[self._ends[index] : self._ends[index + 1]].tobytes())

    @property
    def paths(self) -> Sequence[str]:
        return self

    @cached_property
    def sizes(self) -> np.ndarray:
        """Size of each file in bytes (N,), int64; -1 if it cannot be read."""
        return np.fromiter(map(_size, self), np.int64, len(self))

    def open(self, index: int, reader: ImageReader) -> EncodedImage:
        return reader.open(self[index])

    def digest(self, classes: list[str], skip_bad_images: bool) -> None:
        return None


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # the loader will raise an error or skip the file with a warning
        return -1


@dataclass(eq=False, repr=False)
class ImageDataset(torch.utils.data.Dataset[tuple[Any, Any]]):
    """One split of a data set: item i is (transformed image, label).

    Without a transform, the image is a PIL image in RGB. The label is an int, or for multi-label
    data a float32 tensor (classes,) of 0 and 1. A file that cannot be decoded raises BadImageError.
    With `skip_bad_images`, a loader skips such files.
    """

    split: str
    images: "Paths | ArrowImages"
    labels: Labels
    transform: Callable[[EncodedImage], Any] | None = None
    skip_bad_images: bool = False
    reader: ImageReader = RGB

    @property
    def paths(self) -> Sequence[str]:
        """Paths of the images' files; empty if the images are no files."""
        return self.images.paths

    @property
    def classes(self) -> list[str]:
        """Names of the classes in the order of the labels."""
        return list(self.labels.names)

    @property
    def targets(self) -> torch.Tensor:
        """All labels: int64 (N,), or for multi-label data uint8 (N, classes) of 0 and 1."""
        return torch.from_numpy(np.concatenate([*self.labels.targets()]))

    @property
    def multi(self) -> bool:
        """Whether the data set is multi-label: an image may have any number of labels."""
        return self.labels.multi

    @property
    def digest(self) -> str | None:
        """Hash that identifies the images, or None if their paths and file sizes identify them."""
        return self.images.digest(self.classes, self.skip_bad_images)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        encoded = self.encoded_image(index)
        with as_bad_image_error(encoded.path, MemoryError):
            image = encoded.rgb() if self.transform is None else self.transform(encoded)
        return image, self.labels[index]

    def encoded_image(self, index: int) -> EncodedImage:
        """Read an image without decoding its pixels; an unreadable file raises BadImageError."""
        return self.images.open(index, self.reader)
