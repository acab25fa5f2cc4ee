"""How images are read: as RGB, or with other channels from TIFF and NumPy files.

Values of other channels are not rounded to 8 bits: crops are float32. A run measures the mean and
deviation of each channel once, over the images to train on, and stores them with the weights.
"""

import io
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from tresnet.cores import usable_cores
from tresnet.data.decoding import (
    NO_PIXELS,
    NPY_MAGIC,
    BadImageError,
    Box,
    EncodedImage,
    as_bad_image_error,
    read_image_file,
)
from tresnet.errors import CheckpointError, listed, needed

if TYPE_CHECKING:
    from tresnet.data.dataset import ImageDataset

# Suffixes of image files, for every command; Pillow reads them all.
SUFFIXES = (
    *(".apng", ".avif", ".avifs", ".bmp", ".dib", ".gif", ".j2c", ".j2k", ".jfif", ".jp2", ".jpc"),
    *(".jpe", ".jpeg", ".jpf", ".jpg", ".jpx", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".qoi"),
    *(".tga", ".tif", ".tiff", ".webp"),
)
_SUFFIXES_OF_CHANNELS = (".npy", ".tif", ".tiff")
DTYPES = ("uint8", "uint16", "int16", "float16", "float32")  # float32 holds all their values
# Compressions of TIFF whose output is limited: none, LZW, PackBits, and deflate by its two numbers.
_DEFLATE = (8, 32946)
_COMPRESSIONS = (1, 5, 32773, *_DEFLATE)
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))  # each byte's bits
_BLOCK = 2**18  # values whose moments are taken at once, as float64
_AHEAD = 64  # images for each thread that wait to be measured
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


@dataclass(frozen=True)
class ImageReader:
    """How images are read: as RGB of 8 bits, or with other channels, whose values are kept."""

    channels: int = 3
    dtype: str | None = None  # type of pixels if not RGB; None: any of `DTYPES`
    max_pixels: int | None = None  # of an image; None: Pillow's limit

    @classmethod
    def of(cls, name: str, cfg: Mapping[str, Any], max_pixels: int | None = None) -> Self:
        """Return how to read images for the weights `name`, by their `pretrained_cfg`.

        CheckpointError: for other channels, it states no type of the pixels.
        """
        count, dtype = cfg["input_size"][0], cfg.get("pixel_dtype")
        if count != 3 and dtype is None:
            raise CheckpointError(
                f"expected weights for RGB, or with the type, mean and deviation of pixels, as"
                f" train.py stores them, but {name} takes {count} channels and has none of these"
            )
        return cls(count, None if count == 3 else dtype, max_pixels)

    @property
    def rgb(self) -> bool:
        return self.channels == 3

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Suffixes of the files that can be read, in lower case."""
        return SUFFIXES if self.rgb else _SUFFIXES_OF_CHANNELS

    def open(self, path: str | os.PathLike[str]) -> EncodedImage:
        """Read an image file and parse its header; an unreadable file raises BadImageError."""
        with as_bad_image_error(str(path)):
            data = read_image_file(path)
        return self.decode(data, str(path))

    def decode(self, data: bytes, name: str) -> EncodedImage:
        """Return the image in the content of a file; a bad one raises BadImageError."""
        if self.rgb:
            return EncodedImage(data, name, self.max_pixels)
        return ChannelImage(data, name, self)


RGB = ImageReader()


class ChannelImage(EncodedImage):
    """Image of some channels in memory; its crops are float32 (height, width, channels)."""

    def __init__(self, data: bytes | np.ndarray, path: str, reader: ImageReader) -> None:
        """Decode a file's content, or take an array; raise BadImageError unless it is an image."""
        self._max_pixels, self.path, self._reader = reader.max_pixels, path, reader
        self.data = b"" if isinstance(data, np.ndarray) else data
        read = self._npy
        if self.data.startswith(_TIFF):
            with needed(f"{path}: a TIFF file of other than three channels", "channels"):
                import tifffile  # noqa: F401
            read = self._tiff
        with self._reading():
            self.pixels = data if isinstance(data, np.ndarray) else read(data)
            self._check(self.pixels.shape, self.pixels.dtype)
            if self.pixels.dtype.kind == "f" and not np.isfinite(self.pixels).all():
                raise ValueError("expected finite pixels, got infinities or NaN")
        self.size = self.pixels.shape[1::-1]

    def crop(self, box: Box) -> torch.Tensor:
        top, left, height, width = box
        crop = self.pixels[top : top + height, left : left + width]
        return torch.from_numpy(crop.astype(np.float32))

    def _check(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        from PIL import Image

        count, wanted = self._reader.channels, self._reader.dtype
        if dtype.hasobject:  # a file of them would run code
            raise ValueError("expected an array of numbers, got Python objects, which are not read")
        if len(shape) != 3 or shape[2] != count:
            advice = ": the channels come last" if shape[:1] == (count,) else ""
            raise ValueError(
                f"expected {count} channels, so the shape (height, width, {count}), got"
                f" {shape}{advice}"
            )
        if dtype.name not in (DTYPES if wanted is None else (wanted,)):
            expected = wanted and f"{wanted}, as the images to train on have"
            raise ValueError(f"expected pixels of {expected or listed(DTYPES)}, got {dtype}")
        if 0 in shape:
            raise ValueError(NO_PIXELS)
        Image._decompression_bomb_check((shape[1], shape[0]))

    def _npy(self, data: Any) -> np.ndarray:
        if not data.startswith(NPY_MAGIC):
            raise ValueError("it is neither a TIFF nor a .npy file")
        stream = io.BytesIO(data)
        version = np.lib.format.read_magic(stream)
        if version not in _HEADERS:
            raise ValueError(f"expected a .npy file of version 1.0 or 2.0, got {version}")
        shape, by_columns, dtype = _HEADERS[version](stream)
        self._check(shape, dtype)
        values = np.frombuffer(data, dtype, math.prod(shape), stream.tell())
        return values.reshape(shape, order="F" if by_columns else "C")

    def _tiff(self, data: Any) -> np.ndarray:
        import tifffile

        stream = io.BytesIO(data)
        with tifffile.TiffFile(stream) as file:
            series = file.series[0]
            if series.keyframe.photometric == tifffile.PHOTOMETRIC.PALETTE:
                raise ValueError("expected values of channels, got indices of a palette")
            others = [axis for axis in series.axes if axis not in "YX"]
            if not {*"YX"} <= {*series.axes} or len(others) > 1:
                raise ValueError(f"expected rows, columns and channels, got axes {series.axes}")
            order = [series.axes.index(axis) for axis in ("Y", "X", *others)]
            if others and others[0] not in "SC" and series.shape[-1] == self._reader.channels:
                order = [0, 1, 2]  # (height, width, channels), which tifffile took for pages
            shape = tuple(series.shape[axis] for axis in order)
            self._check(shape if others else (*shape, 1), np.dtype(series.dtype))
            _inflate(series, stream)
            pixels = series.asarray().transpose(order)
        return pixels if others else pixels[..., None]


def _inflate(series: Any, stream: io.BytesIO) -> None:
    """Append what is deflated to the file in memory, uncompressed, for tifffile to read.

    tifffile would expand a strip or tile without a limit. ValueError: one exceeds its declared
    size, a page is missing, or the compression is another one that has no limit.
    """
    from PIL import Image

    if series.dataoffset is not None:  # one uncompressed block
        return
    pages, first = [*series], series.keyframe
    if any(page is None for page in pages):  # tifffile would fill them with zeros
        raise ValueError(
            "expected all channels in one file, but some are missing or in other files: save all"
            " in this file"
        )
    if first.compression not in _COMPRESSIONS:
        name = getattr(first.compression, "name", first.compression)
        raise ValueError(
            f"expected a TIFF without compression, or with deflate, LZW or PackBits, got {name}:"
            " save it uncompressed or with deflate"
        )
    Image._decompression_bomb_check((first.tilewidth, first.tilelength * first.tiledepth))
    if first.compression in _DEFLATE:
        data, size = stream.getvalue(), math.prod(first.chunks) * first.dtype.itemsize
        stream.seek(0, os.SEEK_END)
        for page in pages:
            parts = [*zip(page.dataoffsets, page.databytecounts, strict=False)]
            page.dataoffsets, page.databytecounts = [], []
            for start, length in parts:
                inflater, part = zlib.decompressobj(), data[start : start + length]
                if first.fillorder == 2:
                    part = part.translate(_REVERSED)
                part = inflater.decompress(part, size + 1)
                if len(part) > size:
                    raise ValueError(
                        f"expected strips or tiles of at most {size} bytes, got one that expands"
                        " beyond: save it anew"
                    )
                if length and not inflater.eof:
                    raise ValueError("a deflated strip or tile is incomplete")
                page.dataoffsets.append(stream.tell())
                page.databytecounts.append(stream.write(part))
        first.compression = first.fillorder = 1


class Moments:
    """Number, mean and sum of squared deviations of the pixels of each channel, in float64."""

    def __init__(self, count: int = 0, mean: Any = 0.0, squares: Any = 0.0) -> None:
        self.count, self.mean, self.squares = count, mean, squares

    @classmethod
    def of(cls, pixels: np.ndarray) -> "Moments":
        """Return the moments of an image, by blocks of rows: float64 takes up to 8 times the image.

        Blocks are cut along the longer side, so that even those of a thin image are small.
        """
        image = pixels if len(pixels) >= pixels.shape[1] else pixels.swapaxes(0, 1)
        rows, total = max(1, _BLOCK // image[0].size), cls()
        for top in range(0, len(image), rows):
            block = image[top : top + rows]
            values = block.reshape(-1, block.shape[2]).astype(np.float64)
            mean = values.mean(0)
            values -= mean
            total += cls(len(values), mean, np.square(values, out=values).sum(0))
        return total

    def __add__(self, other: "Moments") -> "Moments":
        """Return the moments of both sets of pixels (Chan et al. 1979), without cancellation."""
        count = self.count + other.count
        if not count:
            return self
        delta, part = other.mean - self.mean, other.count / count
        squares = self.squares + other.squares + delta**2 * self.count * part
        return Moments(count, self.mean + delta * part, squares)

    @property
    def statistics(self) -> dict[str, tuple[float, ...]]:
        """Mean and deviation as entries of a `pretrained_cfg`; a constant channel's deviation is 1.

        A deviation that rounding alone makes differ from 0 counts as 0.
        """
        std = np.sqrt(self.squares / self.count)
        std = np.where(std > 1e-7 * np.abs(self.mean), std, 1.0)
        return {"mean": tuple(self.mean.tolist()), "std": tuple(std.tolist())}


def measure(dataset: "ImageDataset", indices: Iterable[int]) -> tuple[Moments, dict[str, str]]:
    """Return the moments of images' pixels, and the path of an image of each type of pixels.

    An unreadable image raises DataError, or is left out with `skip_bad_images`. The processes that
    torchrun starts on a machine share its cores.
    """

    def moments(index: int) -> tuple[Moments, str, str] | None:
        try:
            image = dataset.encoded_image(index)
        except BadImageError as error:
            if dataset.skip_bad_images:
                return None
            raise error.advising_skip() from error
        assert isinstance(image, ChannelImage), "the data set has channels"
        return Moments.of(image.pixels), image.pixels.dtype.name, image.path

    total, dtypes, rest = Moments(), dict[str, str](), iter(indices)
    threads = max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    with ThreadPoolExecutor(threads) as pool:  # after an error, `map` cancels what waits
        while some := list(islice(rest, _AHEAD * threads)):
            for each in pool.map(moments, some):
                if each is not None:
                    total += each[0]
                    dtypes.setdefault(each[1], each[2])
    return total, dtypes
