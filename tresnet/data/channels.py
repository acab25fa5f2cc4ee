"""Images of other than three channels, from TIFF and NumPy files, whose values are kept.

Nothing is rounded to 8 bits: crops are float32. A run measures the mean and deviation of each
channel once, over the images to train on, and stores them with the weights.
"""

import io
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from tresnet.cores import usable_cores
from tresnet.data.decoding import NO_PIXELS, NPY_MAGIC, BadImageError, Box, EncodedImage
from tresnet.errors import CheckpointError, listed, needed

if TYPE_CHECKING:
    from tresnet.data.dataset import ImageDataset

SUFFIXES = (".npy", ".tif", ".tiff")
DTYPES = ("uint8", "uint16", "int16", "float16", "float32")  # float32 holds all their values
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


@dataclass(frozen=True)
class Channels:
    """What images must have: so many channels, and pixels of a type; None means any of `DTYPES`."""

    count: int
    dtype: str | None = None

    @classmethod
    def of(cls, name: str, cfg: Mapping[str, Any]) -> Self | None:
        """Return what the `pretrained_cfg` of the weights `name` states; None means 8-bit RGB.

        CheckpointError: for other channels, it states no type of the pixels.
        """
        count = cfg["input_size"][0]
        if count == 3:
            return None
        if "pixel_dtype" not in cfg:
            raise CheckpointError(
                f"expected weights for RGB, or with the type, mean and deviation of pixels, as"
                f" train.py stores them, but {name} takes {count} channels and has none of these"
            )
        return cls(count, cfg["pixel_dtype"])

    def check(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Raise ValueError unless an array of this shape and type is such an image."""
        if len(shape) != 3 or shape[2] != self.count:
            advice = ": the channels come last" if shape[:1] == (self.count,) else ""
            raise ValueError(
                f"expected {self.count} channels, so the shape (height, width, {self.count}), got"
                f" {shape}{advice}"
            )
        if dtype.name not in (DTYPES if self.dtype is None else (self.dtype,)):
            expected = self.dtype and f"{self.dtype}, as the images to train on have"
            raise ValueError(f"expected pixels of {expected or listed(DTYPES)}, got {dtype}")


class ChannelImage(EncodedImage):
    """Image of some channels in memory; its crops are float32 (height, width, channels)."""

    def __init__(
        self, data: bytes | np.ndarray, path: str, max_pixels: int | None, channels: Channels
    ) -> None:
        """Decode a file's content, or take an array; raise BadImageError unless it is an image."""
        self._max_pixels, self.path, self._channels = max_pixels, path, channels
        self.data = b"" if isinstance(data, np.ndarray) else data
        read = self._array if isinstance(data, np.ndarray) else self._npy
        if self.data.startswith(_TIFF):
            with needed(f"{path}: a TIFF file of other than three channels", "channels"):
                import tifffile  # noqa: F401
            read = self._tiff
        with self._reading():
            self.pixels: np.ndarray = read(data)
            if self.pixels.dtype.kind == "f" and not np.isfinite(self.pixels).all():
                raise ValueError("expected finite pixels, got infinities or NaN")
        self.size = self.pixels.shape[1::-1]

    def crop(self, box: Box) -> torch.Tensor:
        top, left, height, width = box
        crop = self.pixels[top : top + height, left : left + width]
        return torch.from_numpy(crop.astype(np.float32))

    def _check(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        from PIL import Image

        if dtype.hasobject:  # a file of them would run code
            raise ValueError("expected an array of numbers, got Python objects, which are not read")
        self._channels.check(shape, dtype)
        if 0 in shape:
            raise ValueError(NO_PIXELS)
        Image._decompression_bomb_check((shape[1], shape[0]))

    def _array(self, pixels: Any) -> np.ndarray:
        self._check(pixels.shape, pixels.dtype)
        return pixels

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

        with tifffile.TiffFile(io.BytesIO(data)) as file:
            series = file.series[0]
            others = [axis for axis in series.axes if axis not in "YX"]
            if not {*"YX"} <= {*series.axes} or len(others) > 1:
                raise ValueError(f"expected rows, columns and channels, got axes {series.axes}")
            order = [series.axes.index(axis) for axis in ("Y", "X", *others)]
            if others and others[0] not in "SC" and series.shape[-1] == self._channels.count:
                order = [
                    0,
                    1,
                    2,
                ]  # an array (height, width, channels), which tifffile took for pages
            shape = tuple(series.shape[axis] for axis in order)
            self._check(shape if others else (*shape, 1), np.dtype(series.dtype))
            pixels = series.asarray().transpose(order)
        return pixels if others else pixels[..., None]


class Moments:
    """Number, mean and sum of squared deviations of the pixels of each channel, in float64."""

    def __init__(self, count: int = 0, mean: Any = 0.0, squares: Any = 0.0) -> None:
        self.count, self.mean, self.squares = count, mean, squares

    @classmethod
    def of(cls, pixels: np.ndarray) -> "Moments":
        values = pixels.reshape(-1, pixels.shape[2]).astype(np.float64)
        mean = values.mean(0)
        return cls(len(values), mean, np.square(values - mean).sum(0))

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


def measure(dataset: "ImageDataset", indices: range) -> tuple[Moments, dict[str, str]]:
    """Return the moments of images' pixels, and the path of an image of each type of pixels.

    An unreadable image raises DataError, or is left out with `skip_bad_images`.
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

    total, dtypes = Moments(), dict[str, str]()
    with ThreadPoolExecutor(usable_cores()) as pool:  # after an error, `map` cancels what waits
        for each in pool.map(moments, indices):
            if each is not None:
                total += each[0]
                dtypes.setdefault(each[1], each[2])
    return total, dtypes
