"""Read the images to predict: files, folders, patterns, PIL images, arrays and tensors."""

import collections
import contextlib
import functools
import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np
from torch import Tensor

from tresnet.data.channels import RGB, ChannelImage, ImageReader
from tresnet.data.decoding import NO_PIXELS, EncodedImage, as_bad_image_error, to_rgb
from tresnet.data.folder import check_no_cycle, image_files, warn_left_out
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


def find_images(names: Iterable[str | os.PathLike[str]], reader: ImageReader = RGB) -> list[str]:
    """Return image files in the order of `names`: file names, folders, patterns like '*.png'.

    Named files are not checked. A folder's images are those of `image_files`, and a warning counts
    its other files. A folder or pattern without images raises InputError. A folder that cannot be
    read or contains a link to itself raises DataError.
    """
    paths: list[str] = []
    for name in (os.fspath(name) for name in names):
        if os.path.isdir(name):
            left_out: collections.Counter[str] = collections.Counter()
            more = image_files(name, left_out, reader.suffixes)
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
    images: Source | Iterable[Source], reader: ImageReader
) -> Iterator[tuple[str, Callable[[], "Picture"]]]:
    """Yield each image's name, and a function that returns the image as `reader` reads it."""
    from PIL.Image import Image

    several: Any = [images] if _is_one(images) else images
    if not isinstance(several, Iterable):
        raise InputError(f"expected images, or an iterable of them, got {images!r}")
    for number, one in enumerate(several):
        name = f"image {number}"
        if isinstance(one, str | os.PathLike):
            for path in [one] if isinstance(one, ImageFile) else find_images([one], reader):
                yield path, functools.partial(reader.open, path)
        elif isinstance(one, _BYTES) or hasattr(one, "read"):
            yield name, functools.partial(_decoded, _content(one), name, reader)
        elif isinstance(one, Image) and reader.rgb:
            name = getattr(one, "filename", "") or name
            yield name, functools.partial(_rgb, one, name)
        else:
            yield name, functools.partial(_from_array, one, name, reader)


def _is_one(images: Any) -> bool:
    from PIL.Image import Image

    if isinstance(images, np.ndarray | Tensor):
        return images.ndim in (0, 2, 3)
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


def _decoded(content: bytes | Exception, name: str, reader: ImageReader) -> EncodedImage:
    with as_bad_image_error(name):
        if isinstance(content, Exception):
            raise content
        return reader.decode(content, name)


def _rgb(picture: "Image", name: str) -> "Image":
    with as_bad_image_error(name):
        if 0 in picture.size:
            raise ValueError(NO_PIXELS)
        return to_rgb(picture)


def _from_array(pixels: object, name: str, reader: ImageReader) -> "Picture":
    from PIL import Image

    count, got, array = reader.channels, repr(pixels), pixels
    if isinstance(pixels, np.ndarray | Tensor):
        got = f"{pixels.dtype} {tuple(pixels.shape)}"
    if isinstance(pixels, Tensor):
        with contextlib.suppress(TypeError):  # NumPy has no bfloat16
            array = (pixels.permute(1, 2, 0) if pixels.ndim == 3 else pixels).detach().cpu().numpy()
    if isinstance(array, np.ndarray):
        if not reader.rgb:
            return ChannelImage(array, name, reader)
        if array.ndim == 3 and array.shape[2] == 3 and array.dtype == np.uint8:
            return _rgb(Image.fromarray(np.ascontiguousarray(array)), name)
    if not reader.rgb:
        raise InputError(
            f"expected paths, bytes, open files, arrays (H, W, {count}) or tensors ({count}, H, W),"
            f" got {got:.80}"
        )
    raise InputError(
        "expected paths, PIL images, bytes or open files, or RGB of 8 bits: arrays (H, W, 3) in"
        f" numpy.uint8 or tensors (3, H, W) in torch.uint8, got {got:.80}"
    )
