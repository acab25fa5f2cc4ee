"""Rendering by Pillow, image by image."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tresnet.ops.render import rows as fields
from tresnet.ops.render.rows import LAYER, LAYERS, Op

if TYPE_CHECKING:
    from PIL.Image import Image


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
        top, left, high, wide = row[fields.ERASED : LAYERS].astype(int)
        image[top : top + high, left : left + wide] = 0
    return torch.from_numpy(out).to(pixels.device)


def resize(crop: np.ndarray, row: np.ndarray, size: tuple[int, int], bicubic: bool) -> "Image":
    """Resize a crop (h, w, 3), take the part of `size` (height, width), and flip it."""
    from PIL import Image

    rows, columns, top, left = row[fields.ROWS : fields.FLIP].astype(int).tolist()
    filter_ = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    image = Image.fromarray(crop).resize((columns, rows), filter_)
    if (top, left, rows, columns) != (0, 0, *size):
        image = image.crop((left, top, left + size[1], top + size[0]))
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if row[fields.FLIP] else image


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
