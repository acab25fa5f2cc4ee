"""Rendering by Pillow, image by image."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tresnet.ops.render import rows as fields
from tresnet.ops.render.rows import LAYER, LAYERS, Op

if TYPE_CHECKING:
    from PIL.Image import Image

# Resized pictures that have so many times the pixels of the crop and of the part are not computed.
_LARGE = 16
_ONE = 1 << 22  # a weight of 1


def render(pixels: Tensor, rows: Tensor, size: tuple[int, int], bicubic: bool) -> Tensor:
    """Return images (N, height, width, 3) in uint8 on the device of `pixels`."""
    arena, out = pixels.cpu().numpy(), np.empty((len(rows), *size, 3), np.uint8)
    for image, row in zip(out, rows.numpy(), strict=True):
        begin, height, width = row[:3].astype(int)
        crop = arena[begin : begin + 3 * height * width].reshape(height, width, 3)
        if (row[1 : fields.VERTICAL] == (*size, *size, 0, 0, 0)).all() and not row[LAYERS:].any():
            image[:] = crop  # a complete image
        else:
            picture = resize(crop, row, size, bicubic)
            for op, *arguments in row[LAYERS:].reshape(-1, LAYER).tolist():
                picture = _apply(picture, Op(int(op)), arguments)
            image[:] = np.asarray(picture)
    return torch.from_numpy(out).to(pixels.device)


def resize(crop: np.ndarray, row: np.ndarray, size: tuple[int, int], bicubic: bool) -> "Image":
    """Resize a crop (h, w, 3), take the part of `size` (height, width), and flip it."""
    from PIL import Image

    rows, columns, top, left = row[fields.ROWS : fields.FLIP].astype(int).tolist()
    filter_ = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    if rows * columns > _LARGE * max(math.prod(size), math.prod(crop.shape[:2])):
        image = Image.fromarray(_resized_part(crop, row, size, bicubic))
    else:
        image = Image.fromarray(crop).resize((columns, rows), filter_)
        if (top, left, rows, columns) != (0, 0, *size):
            image = Image.fromarray(_part(np.asarray(image), top, left, size))
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if row[fields.FLIP] else image


def resize_floats(
    crop: np.ndarray, row: np.ndarray, size: tuple[int, int], bicubic: bool
) -> np.ndarray:
    """Do as `resize` with a crop of any number of channels in float32, each by Pillow's mode F."""
    from PIL import Image

    rows, columns, top, left = row[fields.ROWS : fields.FLIP].astype(int).tolist()
    filter_ = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    if rows * columns > _LARGE * max(math.prod(size), math.prod(crop.shape[:2])):
        part = _resized_part(crop, row, size, bicubic)
    else:
        channels = (np.ascontiguousarray(crop[..., index]) for index in range(crop.shape[2]))
        resized = [
            Image.fromarray(channel).resize((columns, rows), filter_) for channel in channels
        ]
        part = _part(np.stack(list(map(np.asarray, resized)), 2), top, left, size)
    return np.ascontiguousarray(part[:, ::-1] if row[fields.FLIP] else part)


def _part(pixels: np.ndarray, top: int, left: int, size: tuple[int, int]) -> np.ndarray:
    """Return the part of `size`, black outside of the picture.

    Image.crop would check the program's limit.
    """
    part = np.zeros((*size, pixels.shape[2]), pixels.dtype)
    inner = pixels[max(top, 0) : top + size[0], max(left, 0) : left + size[1]]
    part[max(-top, 0) :, max(-left, 0) :][: inner.shape[0], : inner.shape[1]] = inner
    return part


def _resized_part(
    crop: np.ndarray, row: np.ndarray, size: tuple[int, int], bicubic: bool
) -> np.ndarray:
    """Return the part of `size` of an enlarged thin crop, which would fill the memory as a whole.

    As in Pillow, weights are computed in double precision, and rounded to integers of 22 bits.
    Floats remain floats.
    """
    part, weights = crop, []
    for axis in (0, 1):
        resized, begin = (int(row[field + axis]) for field in (fields.ROWS, fields.TOP))
        first, matrix = _weights(crop.shape[axis], resized, begin, size[axis], bicubic)
        part = part.take(range(first, first + matrix.shape[1]), axis)
        weights.append(matrix)
    for axis in (0, 1) if row[fields.VERTICAL] else (1, 0):
        sums: Any = np.tensordot(weights[axis], part.astype(np.float64), (1, axis))  # exact
        part = np.moveaxis(sums, 0, axis) / _ONE
        if crop.dtype == np.uint8:
            part = np.clip(np.floor(part + 0.5), 0, 255).astype(np.uint8)
    return part.astype(crop.dtype)


def _weights(
    length: int, resized: int, begin: int, count: int, bicubic: bool
) -> tuple[int, np.ndarray]:
    """Return the first input pixel, and the weights (count, inputs) of `count` output pixels."""
    scale = float(np.float32(length)) / resized
    shrink = max(scale, 1.0)
    support = shrink * (2 if bicubic else 1)
    index = np.arange(begin, begin + count)
    center = (index + 0.5) * scale
    first = np.maximum((center - support + 0.5).astype(np.int64), 0)
    end = np.minimum((center + support + 0.5).astype(np.int64), length)
    taps = first + np.arange((end - first).max())[:, None]  # (taps, count)
    x = np.abs((taps - center + 0.5) * (1 / shrink))
    near, far = 1 - x, np.zeros_like(x)
    if bicubic:
        near, far = (1.5 * x - 2.5) * x * x + 1, (((x - 5) * x + 8) * x - 4) * -0.5
    inside = (taps < end) & (index >= 0) & (index < resized)  # outside, the picture is black
    weight = np.where(inside, np.where(x < 1, near, np.where(x < support / shrink, far, 0)), 0)
    total = np.add.accumulate(weight)[-1]  # one by one, as Pillow adds
    weight = weight / np.where(total == 0, 1, total) * _ONE
    matrix = np.zeros((count, end.max() - first.min()))
    output = np.broadcast_to(np.arange(count), taps.shape)[inside]
    matrix[output, taps[inside] - first.min()] = np.trunc(weight + np.copysign(0.5, weight))[inside]
    return int(first.min()), matrix


def _apply(image: "Image", op: Op, arguments: Sequence[float]) -> "Image":
    from PIL import ImageEnhance, ImageFilter, ImageOps
    from PIL.Image import Resampling, Transform
    from timm.data.auto_augment import solarize_add

    value = arguments[0]
    match op:
        case Op.NONE:
            return image
        case Op.AFFINE:
            filter_ = Resampling.BICUBIC if arguments[9] else Resampling.BILINEAR
            fill = tuple(map(int, arguments[6:9]))
            matrix = tuple(arguments[:6])
            return image.transform(image.size, Transform.AFFINE, matrix, filter_, fillcolor=fill)
        case Op.COLOR | Op.SHARPNESS | Op.BRIGHTNESS | Op.CONTRAST:
            return getattr(ImageEnhance, op.name.capitalize())(image).enhance(value)
        case Op.AUTOCONTRAST | Op.EQUALIZE | Op.INVERT:
            return getattr(ImageOps, op.name.lower())(image)
        case Op.POSTERIZE:  # Pillow 13 refuses to keep 0 bits, which timm's policies draw
            return image.point([v >> (8 - int(value)) << (8 - int(value)) for v in range(256)] * 3)
        case Op.SOLARIZE:
            return ImageOps.solarize(image, int(value))
        case Op.SOLARIZE_ADD:
            return solarize_add(image, int(value), int(arguments[1]))
        case _:
            return image.filter(ImageFilter.GaussianBlur(value))
