"""Triton kernel that divides uint8 images by 255 and applies space-to-depth."""

import triton
import triton.language as tl

# HIGH + LOW is 1 / 255. A byte times HIGH is exact, so the fused byte * HIGH + byte * LOW rounds
# once, like a division. A division would take a dozen more instructions.
HIGH = tl.constexpr(257 / 65536)
LOW = tl.constexpr(1 / 255 - 257 / 65536)


@triton.jit
def stem_input(
    x, out, WIDTH: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, B: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """Write BLOCK values of out[n, i, j, (r, q, c)] = x[n, i B + r, j B + q, c] / 255.

    (i, j) is a block of B x B pixels of x, and (r, q) is a pixel of the block. A row of blocks,
    for each n and i, has WIDTH = W / B * B * B * C values. B * C consecutive values of out are
    consecutive in x too. A thread copies RUN of these values at once; RUN divides B * C.
    """
    row = tl.program_id(0).to(tl.int64) * WIDTH
    run = tl.program_id(1) * (BLOCK // RUN) + tl.arange(0, BLOCK // RUN)
    runs: tl.constexpr = B * C // RUN
    first = (run // (runs * B)) * (B * C) + (run % runs) * RUN + (run // runs) % B * (WIDTH // B)
    offsets = first[:, None] + tl.arange(0, RUN)  # [BLOCK / RUN, RUN]
    value = run[:, None] * RUN + tl.arange(0, RUN)
    mask = (run * RUN < WIDTH)[:, None]
    pixel = tl.load(x + row + offsets, mask=mask, other=0).to(tl.float32)  # [BLOCK / RUN, RUN]
    scaled = pixel * HIGH + pixel * LOW
    tl.store(out + row + value, scaled.to(out.dtype.element_ty), mask=mask)
