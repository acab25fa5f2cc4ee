"""The images to predict: files, folders, patterns, pictures and bytes."""

import glob
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias, Union

import torch
from torch import Tensor

from tresnet.data.folder import image_files, load_rgb
from tresnet.data.pictures import named, to_rgb
from tresnet.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

Source: TypeAlias = Union[str, os.PathLike[str], "Image", Tensor]


def find_images(names: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return image files in order, from files, folders, or patterns such as '*/7/*.png'.

    Files need not exist: reading them raises the error. A folder without images or reached
    twice by a link, or a pattern without files, raises InputError or DataError.
    """
    found: list[str] = []
    for name in (os.fspath(name) for name in names):
        if os.path.isdir(name):
            try:
                more = list(image_files(name, {}))
            except OSError as error:
                why = f"{error.filename}: {error.strerror}"
                raise InputError(f"expected a folder to read, got {why}") from error
        elif glob.has_magic(name) and not os.path.exists(name):
            more = sorted(filter(os.path.isfile, glob.iglob(name, recursive=True)))
        else:
            more = [name]
        if not more:
            raise InputError(f"expected images (jpg, png, ...) at {name}, found none")
        found += more
    return found


def pictures(images: Source | Iterable[Source]) -> Iterator[tuple[str, Callable[[], "Image"]]]:
    """Yield names, and functions that read 8-bit RGB; other objects raise InputError."""
    from PIL.Image import Image

    if isinstance(images, str | os.PathLike | Image) or (
        isinstance(images, Tensor) and images.dim() == 3
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
            yield f"image {number}", lambda one=one: _from_bytes(one)


def _rgb(picture: "Image") -> "Image":
    with named(getattr(picture, "filename", "") or "the picture"):
        return to_rgb(picture)


def _from_bytes(pixels: object) -> "Image":
    from torchvision.transforms.functional import to_pil_image

    got = repr(pixels)
    if isinstance(pixels, Tensor):
        if pixels.dtype == torch.uint8 and pixels.dim() == 3 and len(pixels) == 3:
            return to_pil_image(pixels)
        got = f"{pixels.dtype} {tuple(pixels.shape)}"
    raise InputError(f"expected paths, PIL images or bytes (3, H, W) in torch.uint8, got {got:.80}")
