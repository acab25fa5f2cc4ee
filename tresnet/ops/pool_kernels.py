"""Triton kernels of the mean of 2 x 2 squares of pixels, forward and backward.

A program covers a chunk of the P pixels of the pool's output, counted over all samples, and BC
channels. It loops over tiles of BP pixels. The sizes of the pool's input are even: a row of the
output has WO pixels, and its squares lie in two rows of 2 WO pixels.
"""

import triton
import triton.language as tl

from tresnet.ops.tile_kernels import aligned, chunk_of_program, kernel


@triton.jit
def square_offsets(p, first, WO, C):
    """Return offsets [BP, 1] of the upper left pixels of squares p, from row 2 `first` of x."""
    return (((p // WO - first) * 4 * WO + p % WO * 2) * C)[:, None]


@triton.jit
def store_sum(pointers, value, quarter, mask):
    """Store value + quarter, computed in float32."""
    tl.store(pointers, (value.to(tl.float32) + quarter).to(value.dtype), mask=mask)


@kernel
def avg_pool(x, out, P, C, WO, splits, chunk, BP: tl.constexpr, BC: tl.constexpr, AC: tl.constexpr):
    """Write the means of this program's squares."""
    C = aligned(C, AC)
    _group, _n, start, count, c, c_mask = chunk_of_program(P, C, splits, chunk, BC, True)
    first = start // WO
    x += first.to(tl.int64) * 4 * WO * C
    out += start.to(tl.int64) * C
    for begin in range(0, count, BP):
        q = begin + tl.arange(0, BP)
        inside = (q < count)[:, None] & c_mask[None, :]
        at = x + square_offsets(start + q, first, WO, C) + c
        total = tl.zeros((BP, BC), tl.float32)
        for corner in tl.static_range(4):
            pixel = at + (corner // 2 * 2 * WO + corner % 2) * C
            total += tl.load(pixel, mask=inside, other=0.0).to(tl.float32)  # [BP, BC]
        mean = (total * 0.25).to(out.dtype.element_ty)
        tl.store(out + q[:, None] * C + c, mean, mask=inside)


@kernel
def add_avg_pool_grad(
    grad, grad_x, P, C, WO, splits, chunk, BP: tl.constexpr, BC: tl.constexpr, AC: tl.constexpr
):
    """Add a quarter of `grad` to each pixel of `grad_x` in this program's squares."""
    C = aligned(C, AC)
    _group, _n, start, count, c, c_mask = chunk_of_program(P, C, splits, chunk, BC, True)
    first = start // WO
    grad_x += first.to(tl.int64) * 4 * WO * C
    grad += start.to(tl.int64) * C
    for begin in range(0, count, BP):
        q = begin + tl.arange(0, BP)
        inside = (q < count)[:, None] & c_mask[None, :]
        quarter = tl.load(grad + q[:, None] * C + c, mask=inside, other=0.0)  # [BP, BC]
        quarter = quarter.to(tl.float32) * 0.25
        upper = grad_x + square_offsets(start + q, first, WO, C) + c
        lower = upper + 2 * WO * C
        # all loads come first, because none can overtake a store to the same tensor
        t00 = tl.load(upper, mask=inside, other=0.0)  # [BP, BC]
        t01 = tl.load(upper + C, mask=inside, other=0.0)  # [BP, BC]
        t10 = tl.load(lower, mask=inside, other=0.0)  # [BP, BC]
        t11 = tl.load(lower + C, mask=inside, other=0.0)  # [BP, BC]
        store_sum(upper, t00, quarter, inside)
        store_sum(upper + C, t01, quarter, inside)
        store_sum(lower, t10, quarter, inside)
        store_sum(lower + C, t11, quarter, inside)
