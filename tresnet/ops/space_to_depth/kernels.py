"""Triton kernel that divides uint8 images by 255 and applies space-to-depth."""

import triton
import triton.language as tl

# HIGH + LOW is 1 / 255. A byte times HIGH is exact, so the fused byte * HIGH + byte * LOW rounds
# once, like a division. A division would take a dozen more instructions.
HIGH = tl.constexpr(257 / 65536)
LOW = tl.constexpr(1 / 255 - 257 / 65536)


# RUN divides the strides, so Triton need not compile another version for multiples of 16.
@triton.jit(do_not_specialize=("rows",), do_not_specialize_on_alignment=("xn", "xc", "xh", "xw"))
def stem_input(
    x, out, xn, xc, xh, xw, rows,
    WIDTH: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, B: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Write BLOCK values of out[n, i, j, (r, q, c)] = x[n, c, i B + r, j B + q] / 255.

    (i, j) is a block of B x B pixels of x, and (r, q) is a pixel of the block. For each n and i,
    out has WIDTH = W / B * B * B * C values. If a row of x is dense with its channels innermost,
    then B * C consecutive values of out are consecutive in x too. A thread copies RUN of these
    values at once; RUN divides B * C and the strides xn and xh. For other x, RUN is 0.
    """
    row = tl.program_id(0)
    n = (row // rows).to(tl.int64)
    if RUN:
        # `// RUN * RUN` tells the compiler that RUN divides the strides
        x += n * (xn // RUN * RUN) + (row % rows).to(tl.int64) * (B * (xh // RUN * RUN))
        run = tl.program_id(1) * (BLOCK // RUN) + tl.arange(0, BLOCK // RUN)
        runs: tl.constexpr = B * C // RUN
        first = (run // (runs * B)) * (B * C) + (run % runs) * RUN
        first += (run // runs) % B * (xh // RUN * RUN)
        offsets = first[:, None] + tl.arange(0, RUN)[None, :]
        value = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
        mask = (run * RUN < WIDTH)[:, None]
    else:
        x += n * xn + (row % rows).to(tl.int64) * B * xh
        value = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = value < WIDTH
        column = value // (C * B * B) * B + (value // C) % B
        offsets = (value % C) * xc + (value // (C * B)) % B * xh + column * xw
    pixel = tl.load(x + offsets, mask=mask, other=0).to(tl.float32)
    scaled = pixel * HIGH + pixel * LOW
    tl.store(out + row.to(tl.int64) * WIDTH + value, scaled.to(out.dtype.element_ty), mask=mask)
