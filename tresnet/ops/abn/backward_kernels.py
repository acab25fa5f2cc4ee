"""Triton kernels of the backward of batch norm, activation, blur, gate and residual sum.

The docstring of `kernels` explains programs and chunks, and defines x, z, s and out. The equations
are those of arXiv 1502.03167, section 3; `count` is the number of values per channel:

    m = act'(z), g = transposed blur of (gate * gradient of s + gradient through the SE's mean)
    grad_bias = sum m g                  grad_weight = sum m g (x - mean) * invstd
    grad_x = scale * (m g - grad_bias / count - (x - mean) * invstd * grad_weight / count)
           = scale * m g + k1 * (x - mean) + k0

The first pass (`grad_sums`) sums over the map, and the second pass (`grad_apply`) writes grad_x.
A layer with blur has kernels of its own for both passes. These kernels treat x in squares of 2 x 2
pixels, because the gradients of a square depend on the gradients of only four outputs.
"""

import triton
import triton.language as tl

from tresnet.ops.abn.kernels import STAGES, activate
from tresnet.ops.tiles.kernels import (
    aligned,
    bytes_of_tile,
    chunk_of_program,
    kernel,
    load_norm,
    load_once,
    load_square_gradients,
    pixel_of_square,
    square_of,
    transposed_blur_at,
    unpacked,
    weights_of_pixel,
)


@triton.jit
def activation_slope(z, slope):
    """Return the derivative m of the leaky ReLU at z, for which act(z) = m * z."""
    m = tl.full(z.shape, 1.0, tl.float32)
    if slope is not None:
        m = tl.where(z > 0, m, slope)
    return m


@triton.jit
def store_sums(partial, group, C, c, c_mask, s1, s2, s3, s4, GATED: tl.constexpr):
    """Store this program's sums in partial (N * splits, 2, C), or (N * splits, 4, C) if GATED."""
    kinds: tl.constexpr = 4 if GATED else 2
    partial += group * kinds * C + c
    tl.store(partial, tl.sum(s1, 0), mask=c_mask)
    tl.store(partial + C, tl.sum(s2, 0), mask=c_mask)
    if GATED:
        tl.store(partial + 2 * C, tl.sum(s3, 0), mask=c_mask)
        tl.store(partial + 3 * C, tl.sum(s4, 0), mask=c_mask)


@kernel
def grad_sums(
    grad, second_grad, x, mask, gate, stats, bias, masked_grad, rebuilt, partial,
    P, C, splits, chunk, slope,
    BP: tl.constexpr, BC: tl.constexpr, AC: tl.constexpr,
):  # fmt: skip
    """Write sums over this program's pixels to partial (N * splits, 2 or 4, C), for BN and SE.

    In this kernel g is the gradient of s: `grad`, plus `second_grad` unless that is None. The first
    two sums are of m g and m g (x - mean), where m = act'(z). With a gate, sums of m and
    m (x - mean) follow; `merge_grad_sums` multiplies these by the gradient through the SE's mean.
    With `mask` (see `kernels.apply`), g is 0 where the ReLU is 0. `masked_grad` is then set to g,
    for `grad_apply` and the shortcut. `rebuilt` is set to the recomputed s, or is None.
    """
    C = aligned(C, AC)
    group, n, start, count, c, c_mask = chunk_of_program(P, C, splits, chunk, BC)
    mu, k, beta = load_norm(stats, bias, C, c, c_mask)
    rows = tl.arange(0, BP)
    s1 = tl.zeros((BP, BC), tl.float32)
    s2 = tl.zeros((BP, BC), tl.float32)
    s3 = tl.zeros((BP, BC), tl.float32)
    s4 = tl.zeros((BP, BC), tl.float32)
    first = (n * P + start) * C
    if gate is not None:
        factor = tl.load(gate + n * C + c, mask=c_mask, other=0.0)[None, :]  # [1, BC]
    if mask is not None:
        at, there = bytes_of_tile(n, start + rows, rows < count, P, C, BC)
        ahead = tl.load(mask + at, mask=there, other=0)  # [BP, BC / 8]
    for begin in tl.range(0, count, BP, num_stages=STAGES):
        p = begin + rows
        inside = (p < count)[:, None] & c_mask[None, :]
        offsets = first + p[:, None] * C + c  # [BP, BC]
        delta = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32) - mu
        g = tl.load(grad + offsets, mask=inside, other=0.0).to(tl.float32)
        if second_grad is not None:
            g += tl.load(second_grad + offsets, mask=inside, other=0.0).to(tl.float32)
        if mask is not None:
            g = tl.where(unpacked(ahead, BP, BC), g, 0.0)
            at, there = bytes_of_tile(n, start + p + BP, p + BP < count, P, C, BC)
            ahead = tl.load(mask + at, mask=there, other=0)  # the next tile's bits
            tl.store(masked_grad + offsets, g.to(masked_grad.dtype.element_ty), mask=inside)
        z = delta * k + beta
        if rebuilt is not None:
            s = activate(z, slope)
            if gate is not None:
                s = s * factor
            tl.store(rebuilt + offsets, s.to(rebuilt.dtype.element_ty), mask=inside)
        m = activation_slope(z, slope)
        s1 += m * g
        s2 += m * g * delta
        if gate is not None:
            w = tl.where(inside, m, 0.0)  # g is already 0 outside the map
            s3 += w
            s4 += w * delta
    store_sums(partial, group, C, c, c_mask, s1, s2, s3, s4, gate is not None)


@kernel
def grad_sums_blurred(
    grad, x, gate, stats, bias, partial, P, C, H, W, HO, WO,
    splits, chunk, slope,
    BP: tl.constexpr, BC: tl.constexpr, AC: tl.constexpr,
):  # fmt: skip
    """Write the sums of `grad_sums` for a layer with blur; P is the number of pixels of `grad`.

    g is the transposed blur of `grad`, and w is the transposed blur of a map of ones. With a gate,
    the last two sums are of m w and m w (x - mean), where m = act'(z).
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
            offsets = at[:, None] * C + c  # [BP, BC]
            delta = tl.load(x + offsets, mask=there, other=0.0).to(tl.float32) - mu
            g = transposed_blur_at(t00, t01, t10, t11, u0, u1, v0, v1, corner // 2, corner % 2)
            m = activation_slope(delta * k + beta, slope)
            s1 += m * g
            s2 += m * g * delta
            if gate is not None:
                w = tl.where(there, m, 0.0)  # g is already 0 outside the map
                w = w * weights_of_pixel(u0, u1, v0, v1, corner // 2, corner % 2)
                s3 += w
                s4 += w * delta
    store_sums(partial, group, C, c, c_mask, s1, s2, s3, s4, gate is not None)


@kernel
def merge_grad_sums(
    partial, gate, squeeze_grad, stats, out, G, C, splits, count,
    BG: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Merge the sums of all G chunks into out (4, C): grad_weight, grad_bias, k1 and k0.

    `grad_apply` multiplies x - mean by k1, and adds k0. A program covers BC channels. squeeze_grad
    (N, C) is the gradient that each pixel of a map gets through the SE's mean; None without an SE.
    """
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    c_mask = c < C
    groups = tl.arange(0, BG)
    s1 = tl.zeros((BG, BC), tl.float32)
    s2 = tl.zeros((BG, BC), tl.float32)
    kinds: tl.constexpr = 2 if gate is None else 4
    for begin in range(0, G, BG):
        g = begin + groups
        mask = (g < G)[:, None] & c_mask[None, :]
        offsets = g[:, None] * kinds * C + c[None, :]
        a1 = tl.load(partial + offsets, mask=mask, other=0.0)
        a2 = tl.load(partial + offsets + C, mask=mask, other=0.0)
        if gate is not None:
            sample = (g // splits)[:, None] * C + c[None, :]
            factor = tl.load(gate + sample, mask=mask, other=0.0)
            a1 = a1 * factor
            a2 = a2 * factor
            if squeeze_grad is not None:
                term = tl.load(squeeze_grad + sample, mask=mask, other=0.0)
                a1 += tl.load(partial + offsets + 2 * C, mask=mask, other=0.0) * term
                a2 += tl.load(partial + offsets + 3 * C, mask=mask, other=0.0) * term
        s1 += a1
        s2 += a2
    grad_bias = tl.sum(s1, 0)
    invstd = tl.load(stats + 2 * C + c, mask=c_mask, other=0.0)
    grad_weight = tl.sum(s2, 0) * invstd
    tl.store(out + c, grad_weight, mask=c_mask)
    tl.store(out + C + c, grad_bias, mask=c_mask)
    scale = tl.load(stats + C + c, mask=c_mask, other=0.0)
    tl.store(out + 2 * C + c, -scale * invstd * grad_weight / count, mask=c_mask)
    tl.store(out + 3 * C + c, -scale * grad_bias / count, mask=c_mask)


@triton.jit
def load_factors(factors, C, c, c_mask):
    """Return k1 and k0 at channels c, each (1, BC); both are zeros if factors is None."""
    k1 = tl.zeros(c.shape, tl.float32)
    k0 = k1
    if factors is not None:
        k1 = tl.load(factors + 2 * C + c, mask=c_mask, other=0.0)
        k0 = tl.load(factors + 3 * C + c, mask=c_mask, other=0.0)
    return k1[None, :], k0[None, :]


@kernel
def grad_apply(
    grad, x, gate, squeeze_grad, stats, bias, factors, grad_x,
    P, C, splits, chunk, slope,
    BP: tl.constexpr, BC: tl.constexpr, AC: tl.constexpr,
):  # fmt: skip
    """Write the gradient scale * m g + k1 * (x - mean) + k0 of this program's pixels of x.

    `merge_grad_sums` wrote factors (4, C), whose last two rows are k1 and k0. In eval mode the
    statistics do not depend on x, so factors is None.
    """
    C = aligned(C, AC)
    _group, n, start, count, c, c_mask = chunk_of_program(P, C, splits, chunk, BC, True)
    mu, k, beta = load_norm(stats, bias, C, c, c_mask)
    k1, k0 = load_factors(factors, C, c, c_mask)
    if gate is not None:
        factor = tl.load(gate + n * C + c, mask=c_mask, other=0.0)[None, :]  # [1, BC]
    if squeeze_grad is not None:
        term = tl.load(squeeze_grad + n * C + c, mask=c_mask, other=0.0)[None, :]  # [1, BC]
    first = (n * P + start) * C
    for begin in range(0, count, BP):
        p = begin + tl.arange(0, BP)
        inside = (p < count)[:, None] & c_mask[None, :]
        offsets = first + p[:, None] * C + c  # [BP, BC]
        delta = load_once(x + offsets, inside) - mu
        g = load_once(grad + offsets, inside)
        if gate is not None:
            g = g * factor
        if squeeze_grad is not None:
            g += term
        result = g * activation_slope(delta * k + beta, slope) * k
        if factors is not None:
            result = result + delta * k1 + k0
        tl.store(grad_x + offsets, result.to(grad_x.dtype.element_ty), mask=inside)


@kernel
def grad_apply_blurred(
    grad, x, gate, squeeze_grad, stats, bias, factors, grad_x, P, C, H, W, HO, WO,
    splits, chunk, slope,
    BP: tl.constexpr, BC: tl.constexpr, AC: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x for a layer with blur; P is the number of pixels of `grad`.

    For each pixel of `grad`, a program writes a square of 2 x 2 pixels of `grad_x`.
    """
    C = aligned(C, AC)
    _group, n, start, count, c, c_mask = chunk_of_program(P, C, splits, chunk, BC, True)
    mu, k, beta = load_norm(stats, bias, C, c, c_mask)
    k1, k0 = load_factors(factors, C, c, c_mask)
    if gate is not None:
        factor = tl.load(gate + n * C + c, mask=c_mask, other=0.0)[None, :]  # [1, BC]
    if squeeze_grad is not None:
        term = tl.load(squeeze_grad + n * C + c, mask=c_mask, other=0.0)[None, :]  # [1, BC]
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
            offsets = at[:, None] * C + c  # [BP, BC]
            delta = load_once(x + offsets, there) - mu
            g = transposed_blur_at(t00, t01, t10, t11, u0, u1, v0, v1, corner // 2, corner % 2)
            if gate is not None:
                g = g * factor
            if squeeze_grad is not None:
                g += term * weights_of_pixel(u0, u1, v0, v1, corner // 2, corner % 2)
            result = g * activation_slope(delta * k + beta, slope) * k
            if factors is not None:
                result = result + delta * k1 + k0
            tl.store(grad_x + offsets, result.to(grad_x.dtype.element_ty), mask=there)
