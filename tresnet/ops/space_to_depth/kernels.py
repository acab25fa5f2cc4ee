"""Triton kernel of the stem's input: bytes to scaled values in space-to-depth order, in one pass."""

import triton
import triton.language as tl


@triton.jit
def stem_input(
    x, out, xn, xc, xh, xw, rows,
    WIDTH: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """One stretch of one row of blocks: out[n, i, j, (r, q, c)] = x[n, c, i B + r, j B + q] / 255.

    WIDTH: values in a row of blocks of out, W / B * B * B * C; x has any strides.
    """
    row = tl.program_id(0)
    n = (row // rows).to(tl.int64)
    x += n * xn + (row % rows).to(tl.int64) * B * xh
    value = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = value < WIDTH
    c = value % C
    q = (value // C) % B
    r = (value // (C * B)) % B
    j = value // (C * B * B)
    pixel = tl.load(x + c * xc + r * xh + (j * B + q) * xw, mask=known, other=0)
    scaled = tl.div_rn(pixel.to(tl.float32), 255.0)
    tl.store(out + row.to(tl.int64) * WIDTH + value, scaled.to(out.dtype.element_ty), mask=known)
