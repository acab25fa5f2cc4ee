"""Triton kernel of the stem's input: bytes to scaled values in space-to-depth order, at once."""

import triton
import triton.language as tl

# 1 / 255 in two parts, of which the first times a byte has no rounding: their sum times a byte is
# rounded once, as a division would be, which takes a dozen instructions more.
HIGH = tl.constexpr(257 / 65536)
LOW = tl.constexpr(1 / 255 - 257 / 65536)


# its channels are a constant, and RUN divides the strides that matter
@triton.jit(do_not_specialize=("rows",), do_not_specialize_on_alignment=("xn", "xc", "xh", "xw"))
def stem_input(
    x, out, xn, xc, xh, xw, rows,
    WIDTH: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, B: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """One stretch of one row of blocks: out[n, i, j, (r, q, c)] = x[n, c, i B + r, j B + q] / 255.

    WIDTH: values in a row of blocks of out, W / B * B * B * C. RUN: 0 where x has any strides; else
    its channels and columns lie side by side, so that each B * C values of out are neighbours in x
    too, and RUN at once are read and written: it divides them and the strides of samples and rows.
    """
    row = tl.program_id(0)
    n = (row // rows).to(tl.int64)
    if RUN:
        x += n * (xn // RUN * RUN) + (row % rows).to(tl.int64) * (B * (xh // RUN * RUN))
        run = tl.program_id(1) * (BLOCK // RUN) + tl.arange(0, BLOCK // RUN)
        runs: tl.constexpr = B * C // RUN
        first = (run // (runs * B)) * (B * C) + (run % runs) * RUN
        first += (run // runs) % B * (xh // RUN * RUN)
        offsets = first[:, None] + tl.arange(0, RUN)[None, :]
        value = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
        known = (run * RUN < WIDTH)[:, None]
    else:
        x += n * xn + (row % rows).to(tl.int64) * B * xh
        value = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        known = value < WIDTH
        column = value // (C * B * B) * B + (value // C) % B
        offsets = (value % C) * xc + (value // (C * B)) % B * xh + column * xw
    pixel = tl.load(x + offsets, mask=known, other=0).to(tl.float32)
    scaled = pixel * HIGH + pixel * LOW
    tl.store(out + row.to(tl.int64) * WIDTH + value, scaled.to(out.dtype.element_ty), mask=known)
