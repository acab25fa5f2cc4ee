"""Numbers that describe how a decoded crop becomes an image: one row of float64 for each image.

A row holds, in this order:

    OFFSET HEIGHT WIDTH            where the crop's bytes (height, width, 3) begin, and its shape
    ROWS COLUMNS TOP LEFT          size to resize the crop to, and first pixel of the output in it
    FLIP VERTICAL                  1: flip from left to right; 1: resize vertically first
    LAYERS: for each operation of a policy, LAYER numbers: an `Op`, then its arguments
"""

import enum
import functools
from collections.abc import Sequence

import numpy as np

OFFSET, HEIGHT, WIDTH, ROWS, COLUMNS, TOP, LEFT, FLIP, VERTICAL = range(9)
LAYERS = VERTICAL + 1
LAYER = 11


class Op(enum.IntEnum):
    """Operations on a resized image, and their arguments."""

    NONE = 0
    AFFINE = 1  # 6 numbers of Pillow's matrix, red, green and blue of empty pixels, 1: bicubic
    COLOR = 2  # factor, as the next three
    SHARPNESS = 3
    BRIGHTNESS = 4
    CONTRAST = 5
    AUTOCONTRAST = 6
    EQUALIZE = 7
    INVERT = 8
    POSTERIZE = 9  # bits to keep
    SOLARIZE = 10  # lowest value to invert
    SOLARIZE_ADD = 11  # summand, lowest value to keep
    BLUR = 12  # standard deviation in pixels


TABLED = range(Op.BRIGHTNESS, Op.BLUR)  # operations that map each value by a table


def make_row(
    crop: tuple[int, int],
    resized: tuple[int, int],
    window: tuple[int, int] = (0, 0),
    *,
    flip: bool = False,
    layers: Sequence[Sequence[float]] = (),
    count: int = 0,
) -> np.ndarray:
    """Return the row of a crop; sizes are (height, width). It has at least `count` layers.

    `window` is the (top, left) pixel of the resized crop where the output begins. The offset is 0.
    """
    row = np.zeros(LAYERS + LAYER * max(count, len(layers)))
    row[HEIGHT : ROWS + 4] = *crop, *resized, *window
    (height, width), (lines, columns) = crop, resized
    # Pillow resizes the height first if that shrinks more, which decides how it rounds.
    vertical = _may_begin_vertically() and height - lines > max(0, 2 * (width - columns))
    row[FLIP], row[VERTICAL] = flip, vertical
    for index, layer in enumerate(layers):
        begin = LAYERS + index * LAYER
        row[begin : begin + len(layer)] = layer
    return row


@functools.cache
def _may_begin_vertically() -> bool:
    import PIL

    return int(PIL.__version__.partition(".")[0]) >= 13  # Pillow 12 always begins with the width
