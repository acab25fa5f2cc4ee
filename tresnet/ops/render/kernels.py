"""Triton kernels of rendering: Pillow's arithmetic on all images of a batch at once.

`weights` computes the filters of all images in double precision, and `resize` applies them in
integers, as Pillow does. Each policy layer is one launch of `layer`, after `tables` for operations
that map values by a table. All kernels must be compiled without fused multiply-add, because Pillow
rounds each product. Each is compiled once for all sizes of images.
"""

import triton
import triton.language as tl

from tresnet.ops.render import rows as fields
from tresnet.ops.render.rows import Op

OFFSET = tl.constexpr(fields.OFFSET)
WIDTH = tl.constexpr(fields.WIDTH)
COLUMNS = tl.constexpr(fields.COLUMNS)
LEFT = tl.constexpr(fields.LEFT)
FLIP = tl.constexpr(fields.FLIP)
VERTICAL = tl.constexpr(fields.VERTICAL)
AFFINE = tl.constexpr(int(Op.AFFINE))
COLOR = tl.constexpr(int(Op.COLOR))
SHARPNESS = tl.constexpr(int(Op.SHARPNESS))
BRIGHTNESS = tl.constexpr(int(Op.BRIGHTNESS))
CONTRAST = tl.constexpr(int(Op.CONTRAST))
AUTOCONTRAST = tl.constexpr(int(Op.AUTOCONTRAST))
EQUALIZE = tl.constexpr(int(Op.EQUALIZE))
INVERT = tl.constexpr(int(Op.INVERT))
POSTERIZE = tl.constexpr(int(Op.POSTERIZE))
SOLARIZE = tl.constexpr(int(Op.SOLARIZE))
SOLARIZE_ADD = tl.constexpr(int(Op.SOLARIZE_ADD))
BLUR = tl.constexpr(int(Op.BLUR))
# Arguments of an operation begin behind its `Op`.
ARGUMENT = tl.constexpr(1)
FILL = tl.constexpr(7)  # of an affine map: red, green, blue of empty pixels
CUBIC = tl.constexpr(10)  # of an affine map: 1 for bicubic

BITS = tl.constexpr(22)  # of the fraction of a weight
ONE = tl.constexpr(1 << 22)
HALF = tl.constexpr(1 << 21)


@triton.jit(do_not_specialize=("stride", "height", "width", "taps", "span"))
def weights(
    rows, out, stride, height, width, taps, span,
    BICUBIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write out[n, axis, :, o]: first input pixel, count, and `taps` weights of output pixel o.

    Axis 0 is horizontal and has `width` outputs; axis 1 is vertical and has `height` outputs. The
    count is 0 for outputs outside the resized crop. A weight is an integer, 2^22 for 1.
    """
    n, axis = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = rows + n * stride
    o = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    length = tl.where(axis == 0, width, height)
    in_size = tl.load(row + WIDTH - axis)
    out_size = tl.load(row + COLUMNS - axis)
    index = o.to(tl.float64) + tl.load(row + LEFT - axis)
    inside = (o < length) & (index >= 0) & (index < out_size)
    scale = in_size / out_size
    shrink = tl.maximum(scale, 1.0)
    support = shrink * 2.0 if BICUBIC else shrink
    center = (index + 0.5) * scale
    step = 1.0 / shrink
    first = tl.maximum((center - support + 0.5).to(tl.int32), 0)
    last = tl.minimum((center + support + 0.5).to(tl.int32), in_size.to(tl.int32))
    count = tl.where(inside, last - first, 0)
    out += (n * 2 + axis) * (taps + 2) * span + o
    tl.store(out, first, mask=o < length)
    tl.store(out + span, count, mask=o < length)
    most = tl.max(count)
    total = tl.zeros([BLOCK], tl.float64)
    for k in range(0, most):
        total += tl.where(k < count, _filter(k + first, center, step, BICUBIC), 0.0)
    total = tl.where(total == 0.0, 1.0, total)
    for k in range(0, most):
        weight = _filter(k + first, center, step, BICUBIC) / total * ONE
        rounded = tl.where(weight < 0, weight - 0.5, weight + 0.5).to(tl.int32)
        tl.store(out + (2 + k) * span, rounded, mask=k < count)


@triton.jit
def _filter(pixel, center, step, BICUBIC: tl.constexpr):
    x = tl.abs((pixel.to(tl.float64) - center + 0.5) * step)
    if BICUBIC:
        near = (1.5 * x - 2.5) * x * x + 1.0
        far = (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5
        return tl.where(x < 1.0, near, tl.where(x < 2.0, far, 0.0))
    return tl.where(x < 1.0, 1.0 - x, 0.0)


@triton.jit(do_not_specialize=("stride", "height", "width", "taps", "span"))
def resize(
    pixels, rows, weights, out, stride, height, width, taps, span,
    J: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Write J values along the axis that is resized first, times B along the other axis.

    The J values are pixels times channels. Each line of the input that the B outputs need is
    resized along the first axis and rounded to a byte, then added with its weights to the B sums.
    """
    n = tl.program_id(0).to(tl.int64)
    row = rows + n * stride
    vertical = tl.load(row + VERTICAL) != 0
    line_bytes = tl.load(row + WIDTH).to(tl.int32) * 3
    step, line_step = tl.where(vertical, line_bytes, 3), tl.where(vertical, 3, line_bytes)
    length = tl.where(vertical, height, width)
    lines = tl.where(vertical, width, height)
    j = tl.program_id(1) * J + tl.arange(0, J)  # [J]
    b = tl.program_id(2) * B + tl.arange(0, B)  # [B]
    a, c = j // 3, j % 3
    first_axis = tl.where(vertical, 1, 0)
    mine = weights + (n * 2 + first_axis) * (taps + 2) * span + a
    other = weights + (n * 2 + 1 - first_axis) * (taps + 2) * span + b
    start = tl.load(mine, mask=a < length, other=0)  # [J]
    count = tl.load(mine + span, mask=a < length, other=0)
    start_b = tl.load(other, mask=b < lines, other=0)  # [B]
    count_b = tl.load(other + span, mask=b < lines, other=0)
    begin = tl.min(tl.where(count_b > 0, start_b, 1 << 30))
    end = tl.max(tl.where(count_b > 0, start_b + count_b, 0))
    most = tl.max(count)
    source = pixels + tl.load(row + OFFSET).to(tl.int64) + start.to(tl.int64) * step + c
    sums = tl.full([B, J], HALF, tl.int32)
    for line in range(begin, end):
        at = source + line * line_step
        sum_ = tl.full([J], HALF, tl.int32)
        for k in range(0, most):
            pixel = tl.load(at + k * step, mask=k < count, other=0).to(tl.int32)
            sum_ += pixel * tl.load(mine + (2 + k) * span, mask=k < count, other=0)
        byte = tl.minimum(tl.maximum(sum_ >> BITS, 0), 255)
        t = line - start_b
        weight = tl.load(other + (2 + t) * span, mask=(t >= 0) & (t < count_b), other=0)
        sums += weight[:, None] * byte[None, :]
    bytes_ = tl.minimum(tl.maximum(sums >> BITS, 0), 255)
    bytes_ = tl.where((count_b > 0)[:, None] & (count > 0)[None, :], bytes_, 0)
    y = tl.where(vertical, a[None, :], b[:, None])  # [B, J]
    x = tl.where(vertical, b[:, None], a[None, :])
    x = tl.where(tl.load(row + FLIP) != 0, width - 1 - x, x)
    out += n * height * width * 3
    mask = (b < lines)[:, None] & (a < length)[None, :]
    tl.store(out + (y * width + x) * 3 + c[None, :], bytes_.to(tl.uint8), mask=mask)


@triton.jit
def _blend(a, b, factor):
    """Blend `a` (factor 0) and `b` (factor 1) in float32; return int32."""
    value = a.to(tl.float32) + factor * (b - a).to(tl.float32)
    return tl.minimum(tl.maximum(value, 0.0), 255.0).to(tl.int32)


@triton.jit
def _grey_of(at, mask):
    """Return Pillow's grey of pixels, whose red values are `at`."""
    red = tl.load(at, mask=mask, other=0).to(tl.int32)  # [BLOCK]
    green = tl.load(at + 1, mask=mask, other=0).to(tl.int32)  # [BLOCK]
    blue = tl.load(at + 2, mask=mask, other=0).to(tl.int32)  # [BLOCK]
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


@triton.jit(do_not_specialize=("stride", "column", "pixels"))
def tables(images, rows, out, stride, column, pixels, BLOCK: tl.constexpr):
    """Write out[n, c, v]: the value to which an operation of a layer maps the value v of channel c.

    `column` is where the layer's numbers begin in a row, and `pixels` the number of an image's
    pixels. Operations without a table get the identity.
    """
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    layer = rows + n * stride + column
    op = tl.load(layer).to(tl.int32)
    argument = tl.load(layer + ARGUMENT)
    factor, limit = argument.to(tl.float32), argument.to(tl.int32)
    image = images + n * pixels * 3
    v = tl.arange(0, 256)
    table = v
    if op == BRIGHTNESS:
        table = _blend(v * 0, v, factor)
    if op == INVERT:
        table = 255 - v
    if op == POSTERIZE:
        table = v & (0 - (1 << (8 - limit)))
    if op == SOLARIZE:
        table = tl.where(v < limit, v, 255 - v)
    if op == SOLARIZE_ADD:
        table = tl.where(
            v < tl.load(layer + ARGUMENT + 1).to(tl.int32), tl.minimum(v + limit, 255), v
        )
    if op == CONTRAST:
        sums = tl.zeros([BLOCK], tl.int64)
        for begin in range(0, pixels, BLOCK):
            p = begin + tl.arange(0, BLOCK)
            mask = p < pixels
            sums += tl.where(mask, _grey_of(image + p * 3, mask), 0).to(tl.int64)
        mean = (tl.sum(sums).to(tl.float64) / pixels + 0.5).to(tl.int32)
        table = _blend(v * 0 + mean, v, factor)
    if (op == EQUALIZE) | (op == AUTOCONTRAST):
        counts = tl.zeros([256], tl.int32)
        for begin in range(0, pixels, BLOCK):
            p = begin + tl.arange(0, BLOCK)
            value = tl.load(image + p * 3 + c, mask=p < pixels, other=0).to(tl.int32)
            counts += tl.histogram(value, 256)
        padding = (pixels + BLOCK - 1) // BLOCK * BLOCK - pixels  # counted as zeros
        counts -= tl.where(v == 0, padding, 0)
        low = tl.min(tl.where(counts > 0, v, 255))
        high = tl.max(tl.where(counts > 0, v, 0))
        if op == AUTOCONTRAST:
            scale = 255.0 / tl.maximum(high - low, 1).to(tl.float64)
            stretched = (v.to(tl.float64) * scale + (0 - low).to(tl.float64) * scale).to(tl.int32)
            stretched = tl.minimum(tl.maximum(stretched, 0), 255)
            table = tl.where(high > low, stretched, v)
        else:
            step = (pixels - tl.sum(tl.where(v == high, counts, 0))) // 255
            below = tl.cumsum(counts, 0) - counts
            flat = tl.minimum((step // 2 + below) // tl.maximum(step, 1), 255)
            table = tl.where((high > low) & (step > 0), flat, v)
    tl.store(out + (n * 3 + c) * 256 + v, table.to(tl.uint8))


@triton.jit(do_not_specialize=("stride", "column", "height", "width"))
def layer(images, rows, tables, out, stride, column, height, width, BLOCK: tl.constexpr):
    """Apply one operation to each image: write a channel of `out` (N, height, width, 3)."""
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(2)
    numbers = rows + n * stride + column
    op = tl.load(numbers).to(tl.int32)
    factor = tl.load(numbers + ARGUMENT).to(tl.float32)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = p < height * width
    y, x = p // width, p % width
    image = images + n * height * width * 3
    value = tl.load(image + p * 3 + c, mask=mask, other=0).to(tl.int32)  # [BLOCK]
    if (op >= BRIGHTNESS) & (op < BLUR):
        value = tl.load(tables + (n * 3 + c) * 256 + value).to(tl.int32)  # [BLOCK]
    if op == COLOR:
        value = _blend(_grey_of(image + p * 3, mask), value, factor)
    if op == SHARPNESS:
        inner = mask & (y > 0) & (y < height - 1) & (x > 0) & (x < width - 1)
        smooth = _smooth(image + p * 3 + c, width * 3, inner)
        value = tl.where(inner, _blend(smooth, value, factor), value)
    if op == AFFINE:
        right, down = x.to(tl.float64) + 0.5, y.to(tl.float64) + 0.5
        matrix = numbers + ARGUMENT
        u = tl.load(matrix) * right + tl.load(matrix + 1) * down + tl.load(matrix + 2)
        v = tl.load(matrix + 3) * right + tl.load(matrix + 4) * down + tl.load(matrix + 5)
        inside = mask & (u >= 0.0) & (u < width) & (v >= 0.0) & (v < height)
        u, v = tl.where(inside, u, 0.5) - 0.5, tl.where(inside, v, 0.5) - 0.5
        fill = tl.load(numbers + FILL + c).to(tl.int32)
        if tl.load(numbers + CUBIC) != 0:
            value = tl.where(inside, _bicubic(image + c, u, v, height, width), fill)
        else:
            value = tl.where(inside, _bilinear(image + c, u, v, height, width), fill)
    at = out + (n * height * width + p) * 3 + c
    tl.store(at, value.to(tl.uint8), mask=mask)


@triton.jit
def _smooth(at, line, mask):
    """Return Pillow's SMOOTH filter, in its order of additions in float32."""
    sum_ = _three(at + line, 1 / 13, mask) + 0.5
    sum_ = sum_ + _three(at, 5 / 13, mask)
    sum_ = sum_ + _three(at - line, 1 / 13, mask)
    return tl.minimum(tl.maximum(sum_, 0.0), 255.0).to(tl.int32)


@triton.jit
def _three(at, middle: tl.constexpr, mask):
    left = tl.load(at - 3, mask=mask, other=0).to(tl.float32)
    centre = tl.load(at, mask=mask, other=0).to(tl.float32)
    right = tl.load(at + 3, mask=mask, other=0).to(tl.float32)
    return left * (1 / 13) + centre * middle + right * (1 / 13)


@triton.jit
def _pixel(image, y, x, height, width):
    y, x = tl.minimum(tl.maximum(y, 0), height - 1), tl.minimum(tl.maximum(x, 0), width - 1)
    return tl.load(image + (y * width + x) * 3).to(tl.float64)


@triton.jit
def _bilinear(image, u, v, height, width):
    x, y = tl.floor(u).to(tl.int32), tl.floor(v).to(tl.int32)
    right, down = u - x.to(tl.float64), v - y.to(tl.float64)
    left = _pixel(image, y, x, height, width)
    above = left + (_pixel(image, y, x + 1, height, width) - left) * right
    left = _pixel(image, y + 1, x, height, width)
    below = left + (_pixel(image, y + 1, x + 1, height, width) - left) * right
    return (above + (below - above) * down).to(tl.int32)


@triton.jit
def _cubic(a, b, c, d, at):
    third = 2.0 * (a - b) + c - d
    return b + at * (c - a + at * (third + at * (b - a - c + d)))


@triton.jit
def _cubic_line(image, y, x, right, height, width):
    return _cubic(
        _pixel(image, y, x - 1, height, width),
        _pixel(image, y, x, height, width),
        _pixel(image, y, x + 1, height, width),
        _pixel(image, y, x + 2, height, width),
        right,
    )


@triton.jit
def _bicubic(image, u, v, height, width):
    x, y = tl.floor(u).to(tl.int32), tl.floor(v).to(tl.int32)
    right, down = u - x.to(tl.float64), v - y.to(tl.float64)
    value = _cubic(
        _cubic_line(image, y - 1, x, right, height, width),
        _cubic_line(image, y, x, right, height, width),
        _cubic_line(image, y + 1, x, right, height, width),
        _cubic_line(image, y + 2, x, right, height, width),
        down,
    )
    return tl.minimum(tl.maximum(value, 0.0), 255.0).to(tl.int32)


@triton.jit(do_not_specialize=("stride", "column", "height", "width"))
def blur(
    images, rows, out, stride, column, height, width,
    VERTICALLY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the mean of a box of pixels along one axis, for images whose layer is a blur.

    Numbers 1 to 3 of the layer are the whole pixels of the box's radius, their weight, and the
    weight of the two pixels beyond, in units of 2^-24. Other images are copied.
    """
    n = tl.program_id(0).to(tl.int64)
    numbers = rows + n * stride + column
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]: pixels times channels
    mask = i < height * width * 3
    y, x = i // 3 // width, i // 3 % width
    at, last, step = (y, height - 1, width * 3) if VERTICALLY else (x, width - 1, 3)
    image = images + n * height * width * 3
    value = tl.load(image + i, mask=mask, other=0).to(tl.int64)
    if tl.load(numbers).to(tl.int32) == BLUR:
        radius = tl.load(numbers + ARGUMENT).to(tl.int32)
        start = image + i - at * step
        inner = tl.zeros([BLOCK], tl.int64)
        for k in range(-radius, radius + 1):
            near = tl.minimum(tl.maximum(at + k, 0), last)
            inner += tl.load(start + near * step, mask=mask, other=0).to(tl.int64)
        left, right = tl.maximum(at - radius - 1, 0), tl.minimum(at + radius + 1, last)
        ends = tl.load(start + left * step, mask=mask, other=0).to(tl.int64)
        ends += tl.load(start + right * step, mask=mask, other=0).to(tl.int64)
        value = inner * tl.load(numbers + ARGUMENT + 1).to(tl.int64)
        value += ends * tl.load(numbers + ARGUMENT + 2).to(tl.int64)
        value = (value + (1 << 23)) >> 24
    tl.store(out + n * height * width * 3 + i, value.to(tl.uint8), mask=mask)
