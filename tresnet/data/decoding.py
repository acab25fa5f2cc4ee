"""Read the size of an encoded image from its header, and decode its pixels on demand.

Pillow is the reference decoder. For a crop of a baseline JPEG, nvImageCodec (if installed) decodes
only the crop's pixels, with the values that Pillow gives. A crop of a PPM file needs no decoding
and is copied. A file that Pillow would reject raises `BadImageError`.
"""

import io
import logging
import math
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils.data import get_worker_info

from tresnet.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

logger = logging.getLogger(__name__)

Box = tuple[int, int, int, int]  # top, left, height, width
# A JPEG's scan ends at 0xff, unless 0x00 (data) or 0xd0 to 0xd7 (restart) comes next.
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7]")
_END = b"\xff\xd9"
_PPM = re.compile(rb"P6\n([1-9]\d*) ([1-9]\d*)\n255\n")  # a header as Pillow writes it
NO_PIXELS = "it has a side of 0 pixels"
NPY_MAGIC = b"\x93NUMPY"
# Advice by a word of the reason why an image cannot be read.
_ADVICE = {
    "DecompressionBomb": (
        "replace or delete it, or if you trust it, raise the limit by --max-image-pixels"
    ),
    "MemoryError": "free some memory, or make the image smaller",
    "NumPy": "save its pixels as an image, or pass numpy.load(FILE) to tresnet.predict",
}
# Tags of TIFF files; the last is for channels beside grey, RGB or CMYK.
_BITS, _PHOTOMETRIC, _EXTRA_SAMPLES = 258, 262, 338
_limit: ContextVar[int | None] = ContextVar("_limit", default=None)  # of pixels; None: Pillow's


class BadImageError(DataError):
    """The file `path` is truncated, unreadable or no image; `reason` says why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        fitting = (advice for word, advice in _ADVICE.items() if word in self.reason)
        advice = next(fitting, "replace or delete it")
        return f"expected an image, but {self.path} cannot be read ({self.reason}): {advice}"

    def advising_skip(self) -> DataError:
        """Return a DataError whose message also advises to use `--skip-bad-images`."""
        return DataError(f"{self}, or leave such files out with --skip-bad-images")


@contextmanager
def as_bad_image_error(path: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """Turn every exception of a `kind` in the block into a `BadImageError` for `path`."""
    try:
        yield
    except BadImageError:
        raise
    except kind as error:
        text = re.sub(r" <\S+ object at 0x\w+>", "", str(error))  # drops memory addresses
        reason = " ".join(f"{type(error).__name__}: {text}".split())
        raise BadImageError(path, reason) from error


def read_image_file(path: str | os.PathLike[str]) -> bytes:
    """Return the content of an image file; a pipe, device or folder raises ValueError."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe may block, and a device may never end
        raise ValueError("it is not a regular file")
    return Path(path).read_bytes()


@cache
def _install_limit() -> None:
    """Make Pillow check against `_limit` where that is set, and elsewhere as it does anyway.

    `Image.MAX_IMAGE_PIXELS` is the program's, and one for all threads. Plugins check too.
    """
    from PIL import Image

    of_pillow = Image._decompression_bomb_check

    def check(size: tuple[int, int], *args: Any, **options: Any) -> None:
        if (limit := _limit.get()) is None:
            of_pillow(size, *args, **options)
        elif math.prod(size) > limit:
            raise Image.DecompressionBombError(f"{math.prod(size)} pixels, more than {limit}")

    Image._decompression_bomb_check = check


class EncodedImage:
    """Image file in memory. Its `size` is (width, height); its pixels are decoded on demand."""

    def __init__(self, data: bytes, path: str, max_pixels: int | None = None) -> None:
        """Read the size from the header, or raise BadImageError.

        More than `max_pixels` are an error. None means Pillow's rule, which the program may change.
        """
        self._max_pixels = max_pixels
        self.data, self.path, self._pixels = data, path, _view_ppm(data)
        self.size: tuple[int, int]
        self.size = self._image.size if self._pixels is None else self._pixels.shape[1::-1]
        with self._reading():
            if 0 in self.size:
                raise ValueError(NO_PIXELS)
            if self._pixels is not None and max_pixels is not None:
                from PIL import Image

                Image._decompression_bomb_check(self.size)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Name the file in errors of the block, in which Pillow refuses too many pixels."""
        if self._max_pixels is not None:
            _install_limit()
        token = _limit.set(self._max_pixels)
        try:
            with as_bad_image_error(self.path):
                yield
        finally:
            _limit.reset(token)

    @cached_property
    def _image(self) -> "ImageFile":
        from PIL import Image

        with self._reading():
            if self.data.startswith(NPY_MAGIC):
                raise ValueError("it is a NumPy array")
            return Image.open(io.BytesIO(self.data))

    def rgb(self) -> "Image":
        """Decode the complete image with Pillow, and convert it to 8-bit RGB.

        Alpha is dropped and EXIF orientation is not applied, as in torchvision and timm, so that
        accuracies are comparable. A TIFF's channels beyond RGB are dropped with a warning. 16-bit
        grey values are scaled to 8 bits, not clipped. A damaged file, and pixels of 32-bit integers
        or floats, raise BadImageError.
        """
        with self._reading(), self._image as image:
            image.load()
            if _EXTRA_SAMPLES in getattr(image, "tag_v2", ()):
                _warn(f"{self.path}: only the colours of this TIFF file are read, no other channel")
            return to_rgb(image)

    def crop(self, box: Box) -> torch.Tensor:
        """Decode the pixels in `box`: (height, width, 3), uint8, with the values of `rgb()`."""
        top, left, height, width = box
        if self._pixels is not None:
            return torch.from_numpy(self._pixels[top : top + height, left : left + width].copy())
        # nvImageCodec may give wrong colours for a single column, so it decodes at least two.
        first = min(left, max(self.size[0] - 2, 0)) if width == 1 else left
        wide = max(width, min(2, self.size[0]))
        pixels = None
        if self._is_baseline_rgb():
            pixels = _decode_region(self.data, (top, first, height, wide))
        if pixels is None:
            with self._reading():
                return crop_of(self.rgb(), box)
        return pixels[:, left - first :][:, :width]

    def _is_baseline_rgb(self) -> bool:
        """Return whether the file is a complete baseline JPEG in RGB.

        Only one scan and the end marker may follow the header. This rule excludes progressive
        files, incomplete files, and files with markers that Pillow would reject.
        """
        stream = self._image.fp  # None after `rgb`, which closes the image
        if stream is None or self._image.format != "JPEG" or self._image.mode != "RGB":
            return False
        marker = _MARKER.search(self.data, cast(io.BytesIO, stream).tell())
        return marker is not None and self.data[marker.start() :] == _END


def _view_ppm(data: bytes) -> np.ndarray | None:
    """Return a view (H, W, 3) of a PPM file's pixels, or None for incomplete and other files."""
    if (header := _PPM.match(data)) is None:
        return None
    width, height = map(int, header.groups())
    if len(data) < header.end() + 3 * width * height:
        return None
    pixels = np.frombuffer(data, np.uint8, 3 * width * height, header.end())
    return pixels.reshape(height, width, 3)


def crop_of(image: "Image | EncodedImage", box: Box) -> torch.Tensor:
    """Return the pixels in `box`: of RGB (height, width, 3), uint8; see also `ChannelImage`."""
    if isinstance(image, EncodedImage):
        return image.crop(box)
    top, left, height, width = box
    return torch.from_numpy(np.array(image.crop((left, top, left + width, top + height))))


def _warn(text: str) -> None:
    """Log a warning, in one of the processes that load images."""
    if (worker := get_worker_info()) is None or worker.id == 0:
        logger.warning("%s", text)


def _decode_region(data: bytes, box: Box) -> torch.Tensor | None:
    codec = _codec(os.getpid())
    if codec is None:
        return None
    library, decoder, params = codec
    top, left, height, width = box
    region = library.Region(top, left, top + height, left + width)
    try:
        stream = library.CodeStream(data).get_sub_code_stream(region=region)
        decoded = decoder.decode(stream, params=params)
    except RuntimeError:
        return None
    if decoded is None or tuple(decoded.shape) != (height, width, 3):
        return None
    return torch.from_numpy(np.asarray(decoded))


@cache  # keyed by the process id, so that a forked worker makes its own decoder
def _codec(process: int) -> tuple[Any, Any, Any] | None:
    """Return nvImageCodec, its CPU decoder and decode parameters, or None if it cannot be used."""
    try:
        if find_spec("nvidia") is None or (spec := find_spec("nvidia.nvimgcodec")) is None:
            raise ImportError("it is not installed, and has wheels only for Linux")
        with _only_extensions(Path(str(spec.origin)).parent / "extensions", "libjpeg_turbo_ext*"):
            nvimgcodec = import_module("nvidia.nvimgcodec")
            cpu = nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)
            decoder = nvimgcodec.Decoder(
                device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
                max_num_cpu_threads=1,  # the loader's processes decode in parallel
                backends=[cpu],
            )
            params = nvimgcodec.DecodeParams(
                apply_exif_orientation=False, color_spec=nvimgcodec.ColorSpec.SRGB
            )
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        _warn(
            f"nvImageCodec is not available ({error}): Pillow decodes every image completely, even"
            " if only a crop is needed, which takes longer"
        )
        return None
    return nvimgcodec, decoder, params


@contextmanager
def _only_extensions(folder: Path, pattern: str) -> Iterator[None]:
    """Hide nvImageCodec's extensions outside `pattern`: they print errors of missing libraries."""
    name = "NVIMGCODEC_EXTENSIONS_PATH"
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory() as links:
        for file in folder.glob(pattern):
            (Path(links) / file.name).symlink_to(file)
        os.environ[name] = links
        try:
            yield
        finally:
            os.environ.pop(name)
            if before is not None:
                os.environ[name] = before


def to_rgb(image: "Image") -> "Image":
    """Convert a decoded image to mode RGB; raise ValueError if its pixels have 32 bits."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        wide, tags = np.asarray(image).astype(np.int64), getattr(image, "tag_v2", {})
        largest = 2 ** tags.get(_BITS, (16,))[0] - 1
        if tags.get(_PHOTOMETRIC) == 0:  # white is 0, which Pillow leaves so
            wide = largest - wide
        grey = (255 * wide + largest // 2) // largest
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(f"pixel type {image.mode!r} has no defined range; save it with 8 bits")
    if "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow warns about a direct conversion to RGB
    return image.convert("RGB")
