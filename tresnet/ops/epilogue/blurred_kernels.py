"""Triton kernels of batch norm, activation, blur and gate, and of their backward.

As in `pointwise_kernels`, but s = gate * blur(act(z)) and out = s. The blur maps a row of `size`
pixels to `size_out` outputs. Output i is the mean, weighted by 1, 2, 1, of the pixels 2 i - 1, 2 i
and 2 i + 1. Pixels are reflected at the border. In backward, g is the transposed blur of gate * the
gradient of s, plus the gradient through the SE's mean; the sums leave out gate and SE.
The transposed blur computes squares of 2 x 2 pixels (see `square_of`). Loops have one pipeline
stage: a tile has many loads, and the cache holds pixels that tiles share.
"""

import triton
import triton.language as tl

from tresnet.ops.epilogue.statistics_kernels import load_coefficients, store_sums
from tresnet.ops.tile_kernels import (
    activate,
    activation_slope,
    aligned,
    chunk_of_program,
    kernel,
    load_norm,
    load_once,
)


@triton.jit
def reflect(i, size):
    """Return index i of a row, reflected at the row's border without repeating the edge pixel."""
    i = tl.where(i < 0, -i, i)
    return tl.where(i >= size, 2 * size - 2 - i, i)


@triton.jit
def load_activated(x, w, mask, W, C, mu, k, beta, slope):
    """Return act(z), z = (x - mu) * k + beta, at column w of a row; a w outside is reflected."""
    value = tl.load(x + reflect(w, W)[:, None] * C, mask=mask, other=0.0)  # [BP, BC]
    return activate((value.to(tl.float32) - mu) * k + beta, slope)


@triton.jit
def blurred_rows(x, line, j, c, mask, right, W, C, mu, k, beta, slope):
    """Return weighted sums of a row of act(z) for the blur's output columns 2 j and 2 j + 1.

    Each sum weights three pixels by 1, 2, 1. The first sum reads columns 4 j - 1 to 4 j + 1. The
    second sum reads columns 4 j + 1 to 4 j + 3; `right` is true where output column 2 j + 1 exists.
    """
    x += line[:, None] * C + c
    first = load_activated(x, 4 * j - 1, mask, W, C, mu, k, beta, slope)
    second = load_activated(x, 4 * j, mask, W, C, mu, k, beta, slope)
    third = load_activated(x, 4 * j + 1, mask, W, C, mu, k, beta, slope)
    mask = mask & right
    fourth = load_activated(x, 4 * j + 2, mask, W, C, mu, k, beta, slope)
    fifth = load_activated(x, 4 * j + 3, mask, W, C, mu, k, beta, slope)
    return first + 2.0 * second + third, third + 2.0 * fourth + fifth


@kernel
def apply_blurred(
    x, stats, bias, gate, out, P, C, H, W, HO, WO, splits, chunk, slope,
    BP: tl.constexpr, BC: tl.constexpr, AC: tl.constexpr,
):  # fmt: skip
    """Write out = gate * blur(act(z)); P is the number of squares of 2 x 2 output pixels.

    The blur is 3 x 3 with stride 2, so a square needs act(z) at 5 x 5 = 25 pixels. Four outputs
    computed separately would need 4 x 9 = 36 pixels.
    """
    C = aligned(C, AC)
    _group, n, start, count, c, c_mask = chunk_of_program(P, C, splits, chunk, BC, True)
    mu, k, beta = load_norm(stats, bias, C, c, c_mask)
    if gate is not None:
        gate_row = tl.load(gate + n * C + c, mask=c_mask, other=0.0)[None, :]  # [1, BC]
    x += n * H * W * C
    out += n * HO * WO * C
    for begin in range(0, count, BP):
        p = begin + tl.arange(0, BP)
        mask = (p < count)[:, None] & c_mask[None, :]
        i, j = (start + p) // ((WO + 1) // 2), (start + p) % ((WO + 1) // 2)
        lower, beside = mask & (2 * i + 1 < HO)[:, None], (2 * j + 1 < WO)[:, None]
        line = reflect(4 * i - 1, H) * W
        left0, right0 = blurred_rows(x, line, j, c, mask, beside, W, C, mu, k, beta, slope)
        for half in tl.static_range(2):
            below = lower if half else mask
            line = reflect(4 * i + 2 * half, H) * W
            left1, right1 = blurred_rows(x, line, j, c, below, beside, W, C, mu, k, beta, slope)
            line = reflect(4 * i + 2 * half + 1, H) * W
            left2, right2 = blurred_rows(x, line, j, c, below, beside, W, C, mu, k, beta, slope)
            left = (left0 + 2.0 * left1 + left2) * 0.0625
            right = (right0 + 2.0 * right1 + right2) * 0.0625
            if gate is not None:
                left, right = left * gate_row, right * gate_row
            to = out + ((2 * i + half) * WO + 2 * j)[:, None] * C + c  # [BP, BC]
            tl.store(to, left.to(out.dtype.element_ty), mask=below)
            tl.store(to + C, right.to(out.dtype.element_ty), mask=below & beside)
            left0, right0 = left2, right2


@triton.jit
def odd_pixel_weights(i, size, size_out):
    """Return the blur's weights of pixel 2 i + 1 in outputs i and i + 1, or 0 outside the row.

    A weight is 1/4, or 1/2 in an outermost output that also reads the pixel's reflection. Pixel 2 i
    has the weight 1/2 in output i, and 0 in other outputs.
    """
    near = tl.where(2 * i + 1 < size, tl.where(i == 0, 0.5, 0.25), 0.0)
    far = tl.where(i + 1 < size_out, tl.where(2 * i + 3 == size, 0.5, 0.25), 0.0)
    return near, far


@triton.jit
def square_of(p, H, W, HO, WO):
    """Return row i and column j of the blur's output p, with the `odd_pixel_weights` of i and j.

    The square of output p has the input pixels (2 i, 2 j) to (2 i + 1, 2 j + 1). Only the output p
    and its right, lower and lower right neighbours depend on these four pixels. So the transposed
    blur computes the gradients of four pixels from the gradients of four outputs.
    """
    u0, u1 = odd_pixel_weights(p // WO, H, HO)
    v0, v1 = odd_pixel_weights(p % WO, W, WO)
    return p // WO, p % WO, u0, u1, v0, v1


@triton.jit
def pixel_of_square(i, j, mask, H, W, DI: tl.constexpr, DJ: tl.constexpr):
    """Return the index of pixel (2 i + DI, 2 j + DJ), and a mask of the pixels inside the map."""
    h, w = 2 * i + DI, 2 * j + DJ
    return h * W + w, mask & ((h < H) & (w < W))[:, None]


@triton.jit
def weights_of_pixel(u0, u1, v0, v1, DI: tl.constexpr, DJ: tl.constexpr):
    """Return the sum of the weights that a pixel has in all outputs of the blur.

    The sum is what the transposed blur of a map of ones gives for that pixel.
    """
    rows = (u0 + u1)[:, None] if DI else 0.5
    columns = (v0 + v1)[:, None] if DJ else 0.5
    return rows * columns


@kernel
def squeeze_blurred(
    x, stats, bias, partial, P, C, H, W, HO, WO, splits, chunk, slope,
    BP: tl.constexpr, BC: tl.constexpr, AC: tl.constexpr,
):  # fmt: skip
    """Write the sum of b = blur(act(z)) over this program's pixels to partial (N * splits, C).

    P is the number of pixels of b; b itself is not computed. For each pixel of b, the program adds
    up a 2 x 2 square of act(z), weighted by `weights_of_pixel`.
    """
    C = aligned(C, AC)
    group, n, start, count, c, c_mask = chunk_of_program(P, C, splits, chunk, BC)
    mu, k, beta = load_norm(stats, bias, C, c, c_mask)
    x += n * H * W * C
    total = tl.zeros((BP, BC), tl.float32)
    for begin in tl.range(0, count, BP, num_stages=1):
        p = begin + tl.arange(0, BP)
        inside = (p < count)[:, None] & c_mask[None, :]
        i, j, u0, u1, v0, v1 = square_of(start + p, H, W, HO, WO)
        for corner in tl.static_range(4):
            at, there = pixel_of_square(i, j, inside, H, W, corner // 2, corner % 2)
            value = tl.load(x + at[:, None] * C + c, mask=there, other=0.0)  # [BP, BC]
            a = activate((value.to(tl.float32) - mu) * k + beta, slope)
            a = a * weights_of_pixel(u0, u1, v0, v1, corner // 2, corner % 2)
            total += tl.where(there, a, 0.0)  # outside the map, a is not 0
    tl.store(partial + group * C + c, tl.sum(total, 0), mask=c_mask)


@triton.jit
def load_square_gradients(grad, p, c, mask, u1, v1, WO, C):
    """Load the gradients of the four outputs of a blur that depend on one square of 2 x 2 inputs.

    The gradient of an output outside the map is 0.
    """
    grad += p[:, None] * C + c
    right, lower = mask & (v1 > 0)[:, None], mask & (u1 > 0)[:, None]
    t00 = tl.load(grad, mask=mask, other=0.0).to(tl.float32)  # [BP, BC]
    t01 = tl.load(grad + C, mask=right, other=0.0).to(tl.float32)  # [BP, BC]
    t10 = tl.load(grad + WO * C, mask=lower, other=0.0).to(tl.float32)  # [BP, BC]
    t11 = tl.load(grad + (WO + 1) * C, mask=lower & right, other=0.0).to(tl.float32)  # [BP, BC]
    return t00, t01, t10, t11


@triton.jit
def transposed_row(near, far, u0, u1, ODD: tl.constexpr):
    """Return the gradient of pixel 2 i of a row, or of pixel 2 i + 1 if ODD is 1.

    near and far are the gradients of outputs i and i + 1; u0 and u1 are the odd pixel's weights.
    """
    if ODD:
        return u0[:, None] * near + u1[:, None] * far
    return 0.5 * near


@triton.jit
def transposed_blur_at(t00, t01, t10, t11, u0, u1, v0, v1, DI: tl.constexpr, DJ: tl.constexpr):
    """Return the gradient of pixel (DI, DJ) of a 2 x 2 square, from four output gradients."""
    upper = transposed_row(t00, t01, v0, v1, DJ)
    lower = transposed_row(t10, t11, v0, v1, DJ)
    return transposed_row(upper, lower, u0, u1, DI)


@kernel
def grad_sums_blurred(
    grad, x, stats, bias, partial, P, C, H, W, HO, WO, splits, chunk, slope,
    BP: tl.constexpr, BC: tl.constexpr, AC: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Write the sums of `grad_sums` for a layer with blur; P is the number of pixels of `grad`.

    g is the transposed blur of `grad`, and w is the transposed blur of a map of ones. For an
    SE, the last two sums are of m w and m w (x - mean), where m = act'(z).
    """
    C = aligned(C, AC)
    group, n, start, count, c, c_mask = chunk_of_program(P, C, splits, chunk, BC)
    mu, k, beta = load_norm(stats, bias, C, c, c_mask)
    s1 = tl.zeros((BP, BC), tl.float32)
    s2 = tl.zeros((BP, BC), tl.float32)
    s3 = tl.zeros((BP, BC), tl.float32)
    s4 = tl.zeros((BP, BC), tl.float32)
    x += n * H * W * C
    grad += n * P * C
    for begin in tl.range(0, count, BP, num_stages=1):
        p = begin + tl.arange(0, BP)
        inside = (p < count)[:, None] & c_mask[None, :]
        i, j, u0, u1, v0, v1 = square_of(start + p, H, W, HO, WO)
        t00, t01, t10, t11 = load_square_gradients(grad, start + p, c, inside, u1, v1, WO, C)
        for corner in tl.static_range(4):
            at, there = pixel_of_square(i, j, inside, H, W, corner // 2, corner % 2)
            offsets = at[:, None] * C + c
            delta = tl.load(x + offsets, mask=there, other=0.0).to(tl.float32) - mu  # [BP, BC]
            g = transposed_blur_at(t00, t01, t10, t11, u0, u1, v0, v1, corner // 2, corner % 2)
            m = activation_slope(delta * k + beta, slope)
            s1 += m * g
            s2 += m * g * delta
            if SUMS == 4:
                w = tl.where(there, m, 0.0)  # g is already 0 outside the map
                w = w * weights_of_pixel(u0, u1, v0, v1, corner // 2, corner % 2)
                s3 += w
                s4 += w * delta
    store_sums(partial, group, C, c, c_mask, s1, s2, s3, s4, SUMS)


@kernel
def grad_apply_blurred(
    grad, x, gate, squeeze_grad, stats, bias, norm_grads, grad_x, P, C, H, W, HO, WO,
    splits, chunk, slope, BP: tl.constexpr, BC: tl.constexpr, AC: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x for a layer with blur; P is the number of pixels of `grad`.

    For each pixel of `grad`, a program writes a square of 2 x 2 pixels of `grad_x`.
    """
    C = aligned(C, AC)
    _group, n, start, count, c, c_mask = chunk_of_program(P, C, splits, chunk, BC, True)
    mu, k, beta = load_norm(stats, bias, C, c, c_mask)
    if norm_grads is not None:
        k1, k0 = load_coefficients(norm_grads, C, c, c_mask)
    if gate is not None:
        gate_row = tl.load(gate + n * C + c, mask=c_mask, other=0.0)[None, :]  # [1, BC]
    if squeeze_grad is not None:
        squeeze_row = tl.load(squeeze_grad + n * C + c, mask=c_mask, other=0.0)[None, :]  # [1, BC]
    x += n * H * W * C
    grad += n * P * C
    grad_x += n * H * W * C
    for begin in range(0, count, BP):
        p = begin + tl.arange(0, BP)
        inside = (p < count)[:, None] & c_mask[None, :]
        i, j, u0, u1, v0, v1 = square_of(start + p, H, W, HO, WO)
        t00, t01, t10, t11 = load_square_gradients(grad, start + p, c, inside, u1, v1, WO, C)
        for corner in tl.static_range(4):
            at, there = pixel_of_square(i, j, inside, H, W, corner // 2, corner % 2)
            offsets = at[:, None] * C + c
            delta = load_once(x + offsets, there) - mu  # [BP, BC]
            g = transposed_blur_at(t00, t01, t10, t11, u0, u1, v0, v1, corner // 2, corner % 2)
            if gate is not None:
                g = g * gate_row
            if squeeze_grad is not None:
                g += squeeze_row * weights_of_pixel(u0, u1, v0, v1, corner // 2, corner % 2)
            result = g * activation_slope(delta * k + beta, slope) * k
            if norm_grads is not None:
                result = result + delta * k1 + k0
            tl.store(grad_x + offsets, result.to(grad_x.dtype.element_ty), mask=there)
