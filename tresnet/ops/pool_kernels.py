"""Triton kernels of the mean of 2 x 2 squares of pixels, forward and backward.

A program covers a chunk of the P pixels of the pool's output, counted over all samples, and BC
channels. It loops over tiles of BP pixels. The sizes of the pool's input are even: a row of the
output has WO pixels, and its squares lie in two rows of 2 WO pixels.
"""

import triton
import triton.language as tl

from tresnet.ops.tile_kernels import aligned, chunk_of_program, kernel


@triton.jit
def pixel_of_square(p, WO, DI: tl.constexpr, DJ: tl.constexpr):
    """Return the index of pixel (DI, DJ) of the square whose mean is pixel p of the output."""
    row, column = (p // WO).to(tl.int64), p % WO
    return (2 * row + DI) * (2 * WO) + 2 * column + DJ


@kernel
def avg_pool(x, out, P, C, WO, splits, chunk, BP: tl.constexpr, BC: tl.constexpr, AC: tl.constexpr):
    """Write the means of this program's squares."""
    C = aligned(C, AC)
    _group, _n, start, count, c, c_mask = chunk_of_program(P, C, splits, chunk, BC, True)
    for begin in range(0, count, BP):
        q = begin + tl.arange(0, BP)
        p, inside = start + q, (q < count)[:, None] & c_mask[None, :]
        total = tl.zeros((BP, BC), tl.float32)
        for corner in tl.static_range(4):
            at = pixel_of_square(p, WO, corner // 2, corner % 2)[:, None] * C + c[None, :]
            total += tl.load(x + at, mask=inside, other=0.0).to(tl.float32)  # [BP, BC]
        at = p.to(tl.int64)[:, None] * C + c[None, :]
        tl.store(out + at, (total * 0.25).to(out.dtype.element_ty), mask=inside)


@kernel
def add_avg_pool_grad(
    grad, grad_x, P, C, WO, splits, chunk, BP: tl.constexpr, BC: tl.constexpr, AC: tl.constexpr
):
    """Add a quarter of `grad` to each pixel of `grad_x` in this program's squares."""
    C = aligned(C, AC)
    _group, _n, start, count, c, c_mask = chunk_of_program(P, C, splits, chunk, BC, True)
    for begin in range(0, count, BP):
        q = begin + tl.arange(0, BP)
        p, inside = start + q, (q < count)[:, None] & c_mask[None, :]
        at = p.to(tl.int64)[:, None] * C + c[None, :]
        quarter = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * 0.25  # [BP, BC]
        for corner in tl.static_range(4):
            at = pixel_of_square(p, WO, corner // 2, corner % 2)[:, None] * C + c[None, :]
            total = tl.load(grad_x + at, mask=inside, other=0.0).to(tl.float32) + quarter
            tl.store(grad_x + at, total.to(grad_x.dtype.element_ty), mask=inside)
