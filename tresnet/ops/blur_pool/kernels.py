"""Triton kernels of the blur and its transpose, and the parts of them that others share.

A row of `size` pixels gives `size_out` blurred ones, each the weighted mean, by 1, 2, 1, of the pixel
at twice its place and its two neighbours; beyond the border the row is reflected.
"""

import triton
import triton.language as tl


@triton.jit
def aligned(value, BY: tl.constexpr):
    """`value`, a multiple of BY, such that the compiler sees it and loads BY values at once."""
    return value // BY * BY


@triton.jit
def strides(n, p, c, AP: tl.constexpr, AC: tl.constexpr):
    """The strides of samples, pixels and channels; the multiples they are, as `aligned`."""
    return aligned(n, AP * AC), aligned(p, AC), aligned(c, AP)


@triton.jit
def place(P, C, splits, chunk, BC: tl.constexpr, AC: tl.constexpr):
    """What this program covers: its group, the sample, first pixel and number of pixels of it.

    Then its channels, and which of them exist.
    """
    columns = tl.cdiv(C, BC)
    group = tl.program_id(0) // columns
    start = (group % splits) * chunk
    c = (tl.program_id(0) % columns) * BC + tl.arange(0, BC)
    known = c < aligned(C, AC)
    return group, (group // splits).to(tl.int64), start, tl.minimum(chunk, P - start), c, known


@triton.jit
def reflect(i, size):
    """Index into a row whose border is reflected without repeating the edge."""
    i = tl.where(i < 0, -i, i)
    return tl.where(i >= size, 2 * size - 2 - i, i)


@triton.jit
def taps(i, size, size_out):
    """The outputs of the blur that read pixel i of a row, and how much of it each takes, in quarters.

    An even pixel is the centre of one output; an odd one lies between two, and is read once more
    by the outermost ones, whose border is its reflection.
    """
    odd = i % 2
    first = i // 2
    near = tl.where(odd == 0, 2.0, tl.where(i == 1, 2.0, 1.0))
    second = first + 1
    far = tl.where((odd == 1) & (second < size_out), tl.where(i == size - 2, 2.0, 1.0), 0.0)
    return first, near, second, far


@triton.jit
def share_of(p, H, W, HO, WO):
    """How much of pixel p all outputs of the blur take together: the transposed blur of ones."""
    _r0, u0, _r1, u1 = taps(p // W, H, HO)
    _q0, v0, _q1, v1 = taps(p % W, W, WO)
    return (u0 + u1) * (v0 + v1) * 0.0625


@triton.jit
def unblur(grad, p, c, mask, gp, gc, H, W, HO, WO):
    """The transposed blur at pixels p and channels c: what the up to four readers of p pass back."""
    r0, u0, r1, u1 = taps(p // W, H, HO)
    q0, v0, q1, v1 = taps(p % W, W, WO)
    column = c[None, :] * gc
    lower = mask & (u1 > 0)[:, None]
    right = mask & (v1 > 0)[:, None]
    t00 = tl.load(grad + (r0 * WO + q0)[:, None] * gp + column, mask=mask, other=0.0)
    t01 = tl.load(grad + (r0 * WO + q1)[:, None] * gp + column, mask=right, other=0.0)
    t10 = tl.load(grad + (r1 * WO + q0)[:, None] * gp + column, mask=lower, other=0.0)
    t11 = tl.load(grad + (r1 * WO + q1)[:, None] * gp + column, mask=lower & right, other=0.0)
    upper = v0[:, None] * t00.to(tl.float32) + v1[:, None] * t01.to(tl.float32)
    below = v0[:, None] * t10.to(tl.float32) + v1[:, None] * t11.to(tl.float32)
    return (u0[:, None] * upper + u1[:, None] * below) * 0.0625


@triton.jit
def blur(
    x, out, P, C, H, W, WO, xn, xp, xc, on, op, oc, splits, chunk,
    BP: tl.constexpr, BC: tl.constexpr, AP: tl.constexpr, AC: tl.constexpr,
):  # fmt: skip
    """One chunk of one sample of the blurred image; P counts the pixels of out."""
    P = aligned(P, AP)
    xn, xp, xc = strides(xn, xp, xc, AP, AC)
    on, op, oc = strides(on, op, oc, AP, AC)
    _group, n, start, count, c, known = place(P, C, splits, chunk, BC, AC)
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


@triton.jit
def transposed_blur(
    grad, out, P, C, H, W, HO, WO, gn, gp, gc, on, op, oc, splits, chunk,
    BP: tl.constexpr, BC: tl.constexpr, AP: tl.constexpr, AC: tl.constexpr,
):  # fmt: skip
    """One chunk of one sample of the transposed blur; P = H * W counts the pixels of out."""
    P = aligned(P, AP)
    gn, gp, gc = strides(gn, gp, gc, AP, AC)
    on, op, oc = strides(on, op, oc, AP, AC)
    _group, n, start, count, c, known = place(P, C, splits, chunk, BC, AC)
    rows = tl.arange(0, BP)
    out += n * on + start.to(tl.int64) * op
    for begin in range(0, count, BP):
        p = begin + rows
        mask = (p < count)[:, None] & known[None, :]
        y = unblur(grad + n * gn, start + p, c, mask, gp, gc, H, W, HO, WO)
        offsets = p[:, None] * op + c[None, :] * oc
        tl.store(out + offsets, y.to(out.dtype.element_ty), mask=mask)
