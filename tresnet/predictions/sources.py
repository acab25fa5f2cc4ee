"""Read the images to predict: files, folders, patterns, PIL images, arrays and tensors."""

import glob
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias, Union

import numpy as np
from torch import Tensor

from tresnet.data.folder import image_files, load_rgb
from tresnet.data.pictures import named, to_rgb
from tresnet.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

Source: TypeAlias = Union[str, os.PathLike[str], "Image", np.ndarray, Tensor]


def find_images(names: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return image files in the order of `names`: files, folders and patterns like '*.png'.

    A named file need not exist. A folder or pattern without images raises InputError. A folder that
    cannot be read raises DataError.
    """
    paths: list[str] = []
    for name in (os.fspath(name) for name in names):
        if os.path.isdir(name):
            more = list(image_files(name))
        elif glob.has_magic(name) and not os.path.exists(name):
            more = sorted(filter(os.path.isfile, glob.iglob(name, recursive=True)))
        else:
            more = [name]
        if not more:
            raise InputError(f"expected images (jpg, png, ...) at {name}, found none")
        paths += more
    return paths


def pictures(images: Source | Iterable[Source]) -> Iterator[tuple[str, Callable[[], "Image"]]]:
    """Yield each image's name, and a function that reads and returns the image in 8-bit RGB."""
    from PIL.Image import Image

    if isinstance(images, str | os.PathLike | Image) or (
        isinstance(images, np.ndarray | Tensor) and images.ndim in (2, 3)
    ):
        images = [images]
    if not isinstance(images, Iterable):
        raise InputError(f"expected images, or an iterable of them, got {images!r}")
    for number, one in enumerate(images):
        if isinstance(one, str | os.PathLike):
            for path in find_images([one]):
                yield path, lambda path=path: load_rgb(path)
        elif isinstance(one, Image):
            yield getattr(one, "filename", "") or f"image {number}", lambda one=one: _rgb(one)
        else:
            yield f"image {number}", lambda one=one: _from_pixels(one)


def _rgb(picture: "Image") -> "Image":
    with named(getattr(picture, "filename", "") or "the picture"):
        return to_rgb(picture)


def _from_pixels(pixels: object) -> "Image":
    from PIL import Image

    got = repr(pixels)
    if isinstance(pixels, np.ndarray | Tensor):
        got = f"{pixels.dtype} {tuple(pixels.shape)}"
        if pixels.ndim == 3 and str(pixels.dtype) in ("uint8", "torch.uint8"):
            rows = pixels if isinstance(pixels, np.ndarray) else pixels.permute(1, 2, 0).cpu()
            if rows.shape[-1] == 3:
                return Image.fromarray(np.ascontiguousarray(rows))
    raise InputError(
        "expected paths, PIL images, or RGB of 8 bits: arrays (H, W, 3) in numpy.uint8 or tensors"
        f" (3, H, W) in torch.uint8, got {got:.80}"
    )
