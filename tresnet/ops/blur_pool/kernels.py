"""Triton kernels of the blur and its transpose."""

import triton.language as tl

from tresnet.ops.tiles.kernels import (
    aligned,
    aligned_strides,
    chunk_of_program,
    kernel,
    load_square_gradients,
    pixel_of_square,
    reflect,
    square_of,
    transposed_blur_at,
)


@kernel
def blur(
    x, out, P, C, H, W, WO, xn, xp, xc, on, op, oc, splits, chunk,
    BP: tl.constexpr, BC: tl.constexpr, AP: tl.constexpr, AC: tl.constexpr,
):  # fmt: skip
    """One chunk of one sample of the blurred image; P counts the pixels of out."""
    P, C = aligned(P, AP), aligned(C, AC)
    xn, xp, xc = aligned_strides(xn, xp, xc, AP, AC)
    on, op, oc = aligned_strides(on, op, oc, AP, AC)
    _group, n, start, count, c, known = chunk_of_program(P, C, splits, chunk, BC, AP, AC)
    rows = tl.arange(0, BP)
    x += n * xn
    out += n * on + start.to(tl.int64) * op
    for begin in range(0, count, BP):
        p = begin + rows
        mask = (p < count)[:, None] & known[None, :]
        y = tl.zeros((BP, BC), tl.float32)
        for i in tl.static_range(3):
            h = reflect(2 * ((start + p) // WO) - 1 + i, H)
            for j in tl.static_range(3):
                w = reflect(2 * ((start + p) % WO) - 1 + j, W)
                tap = tl.load(x + (h * W + w)[:, None] * xp + c[None, :] * xc, mask=mask, other=0.0)
                y += tap.to(tl.float32) * (0.0625 * (1 + i * (2 - i)) * (1 + j * (2 - j)))
        offsets = p[:, None] * op + c[None, :] * oc
        tl.store(out + offsets, y.to(out.dtype.element_ty), mask=mask)


@kernel
def transposed_blur(
    grad, out, P, C, H, W, HO, WO, gn, gp, gc, on, op, oc, splits, chunk,
    BP: tl.constexpr, BC: tl.constexpr, AP: tl.constexpr, AC: tl.constexpr,
):  # fmt: skip
    """One chunk of one sample of the transposed blur; P counts the pixels of grad."""
    P, C = aligned(P, AP), aligned(C, AC)
    gn, gp, gc = aligned_strides(gn, gp, gc, AP, AC)
    on, op, oc = aligned_strides(on, op, oc, AP, AC)
    _group, n, start, count, c, known = chunk_of_program(P, C, splits, chunk, BC, AP, AC)
    rows = tl.arange(0, BP)
    grad += n * gn
    out += n * on
    for begin in range(0, count, BP):
        p = start + begin + rows
        mask = (begin + rows < count)[:, None] & known[None, :]
        i, j, u0, u1, v0, v1 = square_of(p, H, W, HO, WO)
        t00, t01, t10, t11 = load_square_gradients(grad, p, c, mask, u1, v1, WO, gp, gc)
        for corner in tl.static_range(4):
            at, inside = pixel_of_square(i, j, mask, H, W, corner // 2, corner % 2)
            y = transposed_blur_at(t00, t01, t10, t11, u0, u1, v0, v1, corner // 2, corner % 2)
            offsets = at[:, None] * op + c[None, :] * oc
            tl.store(out + offsets, y.to(out.dtype.element_ty), mask=inside)
