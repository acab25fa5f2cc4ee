"""Read the images to predict: files, folders, patterns, PIL images, arrays and tensors."""

import collections
import functools
import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np
from torch import Tensor

from tresnet.data.channels import SUFFIXES, ChannelImage, Channels
from tresnet.data.decoding import (
    NO_PIXELS,
    BadImageError,
    EncodedImage,
    as_bad_image_error,
    to_rgb,
)
from tresnet.data.folder import (
    EXTENSIONS,
    check_no_cycle,
    image_files,
    open_bytes,
    open_image,
    warn_left_out,
)
from tresnet.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

_BYTES = (bytes, bytearray, memoryview)
Source: TypeAlias = Union[
    str, os.PathLike[str], "Image", np.ndarray, Tensor, bytes, bytearray, memoryview, IO[bytes]
]

Picture: TypeAlias = Union["Image", EncodedImage]


class ImageFile(str):
    """Path of an image file: no folder, and its characters are no pattern."""


def find_images(
    names: Iterable[str | os.PathLike[str]], channels: Channels | None = None
) -> list[str]:
    """Return image files in the order of `names`: file names, folders, patterns like '*.png'.

    Named files are not checked. A folder's images are those of `image_files`, and a warning counts
    its other files. With `channels`, they are TIFF and .npy files. A folder or pattern without
    images raises InputError. A folder that cannot be read or contains a link to itself raises
    DataError.
    """
    paths: list[str] = []
    for name in (os.fspath(name) for name in names):
        if os.path.isdir(name):
            left_out: collections.Counter[str] = collections.Counter()
            more = image_files(name, left_out, EXTENSIONS if channels is None else SUFFIXES)
            warn_left_out(name, left_out)
        elif glob.has_magic(name) and not os.path.lexists(name):
            more = sorted(_matches(name))
        else:
            more = [name]
        if not more:
            raise InputError(f"expected images (jpg, png, ...) at {name}, found none")
        paths += map(ImageFile, more)
    return paths


def _matches(pattern: str) -> Iterator[str]:
    root = os.path.dirname(re.split(r"[*?[]", pattern, maxsplit=1)[0])
    check = functools.cache(functools.partial(check_no_cycle, root=root))
    for path in glob.iglob(pattern, recursive=True):
        if os.path.isfile(path):
            check(os.path.dirname(path))
            yield path


def pictures(
    images: Source | Iterable[Source],
    max_pixels: int | None = None,
    channels: Channels | None = None,
) -> Iterator[tuple[str, Callable[[], "Picture"]]]:
    """Yield each image's name, and a function that reads and returns the image in 8-bit RGB.

    With `channels`, the image has those, and comes from TIFF and .npy files and from arrays.
    """
    from PIL.Image import Image

    decoded: Any = EncodedImage.rgb if channels is None else lambda image: image
    several: Any = [images] if _is_one(images) else images
    if not isinstance(several, Iterable):
        raise InputError(f"expected images, or an iterable of them, got {images!r}")
    for number, one in enumerate(several):
        if isinstance(one, str | os.PathLike):
            for path in [one] if isinstance(one, ImageFile) else find_images([one], channels):
                yield path, lambda path=path: decoded(open_image(path, max_pixels, channels))
        elif channels is not None and not (isinstance(one, _BYTES) or hasattr(one, "read")):
            name = f"image {number}"
            yield name, lambda one=one, name=name: _from_array(one, name, max_pixels, channels)
        elif isinstance(one, Image):
            name = getattr(one, "filename", "") or f"image {number}"
            yield name, lambda one=one, name=name: _rgb(one, name)
        elif isinstance(one, _BYTES) or hasattr(one, "read"):
            options = _content(one), f"image {number}", max_pixels, channels
            yield options[1], lambda options=options: decoded(_opened(*options))
        else:
            name = f"image {number}"
            yield name, lambda one=one, name=name: _from_pixels(one, name)


def _from_array(
    pixels: object, name: str, max_pixels: int | None, channels: Channels
) -> ChannelImage:
    if isinstance(pixels, Tensor) and pixels.ndim == 3:
        pixels = pixels.permute(1, 2, 0).cpu().numpy()
    if not isinstance(pixels, np.ndarray):
        raise InputError(
            f"expected paths, bytes, open files, arrays (H, W, {channels.count}) or tensors"
            f" ({channels.count}, H, W), got {pixels!r:.80}"
        )
    return ChannelImage(pixels, name, max_pixels, channels)


def _is_one(images: Any) -> bool:
    from PIL.Image import Image

    if isinstance(images, np.ndarray | Tensor):
        return images.ndim in (2, 3)
    return isinstance(images, (str, os.PathLike, Image, *_BYTES)) or hasattr(images, "read")


def _content(one: Any) -> bytes | Exception:
    """Return the bytes of an image, read now because their file may be closed soon, or an error."""
    try:
        content = one if isinstance(one, _BYTES) else one.read()
    except (OSError, ValueError) as error:
        return error
    if isinstance(content, str):
        raise InputError(f"expected a file opened in binary mode ('rb'), got {one!r}")
    return bytes(content)


def _opened(content: bytes | Exception, name: str, *options: Any) -> EncodedImage:
    with as_bad_image_error(name):
        if isinstance(content, Exception):
            raise content
        return open_bytes(content, name, *options)


def _rgb(picture: "Image", name: str) -> "Image":
    with as_bad_image_error(name):
        if 0 in picture.size:
            raise ValueError(NO_PIXELS)
        return to_rgb(picture)


def _from_pixels(pixels: object, name: str) -> "Image":
    from PIL import Image

    got = repr(pixels)
    if isinstance(pixels, np.ndarray | Tensor):
        got = f"{pixels.dtype} {tuple(pixels.shape)}"
        if pixels.ndim == 3 and str(pixels.dtype) in ("uint8", "torch.uint8"):
            array = pixels if isinstance(pixels, np.ndarray) else pixels.permute(1, 2, 0).cpu()
            if array.shape[-1] == 3:
                if 0 in array.shape:
                    raise BadImageError(name, NO_PIXELS)
                return Image.fromarray(np.ascontiguousarray(array))
    raise InputError(
        "expected paths, PIL images, bytes or open files, or RGB of 8 bits: arrays (H, W, 3) in"
        f" numpy.uint8 or tensors (3, H, W) in torch.uint8, got {got:.80}"
    )
