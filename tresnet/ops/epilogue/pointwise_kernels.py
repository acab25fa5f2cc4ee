"""Triton kernels of batch norm, activation, gate and residual sum without blur, and of backward.

x is the convolution's output, invstd = 1 / sqrt(var + eps), scale = weight * invstd. Forward:

    z = (x - mean) * scale + bias, a = act(z), s = gate * a, out = relu(s + shortcut)

An absent operation is the identity. If a tensor or `slope` is None, its operation is absent from
the compiled kernel. Backward (arXiv 1502.03167, section 3), for `count` values per channel:

    m = act'(z), g = gate * gradient of s + gradient through the SE's mean
    grad_bias = sum m g                  grad_weight = sum m g (x - mean) * invstd
    grad_x = scale * (m g - grad_bias / count - (x - mean) * invstd * grad_weight / count)
           = scale * m g + k1 * (x - mean) + k0

The first pass (`grad_sums`) sums over the map, and the second pass (`grad_apply`) writes grad_x.
The sums leave the gate and SE out of g; `merge_grad_sums` multiplies by them, because they are
constant in a sample and channel.
"""

import triton.language as tl

from tresnet.ops.epilogue.statistics_kernels import (
    load_coefficients,
    merge_moments_of,
    store_sums,
)
from tresnet.ops.tile_kernels import (
    STAGES,
    activate,
    activation_slope,
    aligned,
    bytes_of_tile,
    chunk_of_program,
    kernel,
    load_norm,
    load_once,
    packed,
    unpacked,
)


@kernel
def squeeze(
    x, stats, bias, partial, P, C, splits, chunk, slope,
    BP: tl.constexpr, BC: tl.constexpr, AC: tl.constexpr,
):  # fmt: skip
    """Write the sum of a = act(z) over this program's pixels to partial (N * splits, C)."""
    C = aligned(C, AC)
    group, n, start, count, c, c_mask = chunk_of_program(P, C, splits, chunk, BC)
    mu, k, beta = load_norm(stats, bias, C, c, c_mask)
    x += (n * P + start) * C
    total = tl.zeros((BP, BC), tl.float32)
    for begin in tl.range(0, count, BP, num_stages=STAGES):
        p = begin + tl.arange(0, BP)
        inside = (p < count)[:, None] & c_mask[None, :]
        value = tl.load(x + p[:, None] * C + c, mask=inside, other=0.0)  # [BP, BC]
        a = activate((value.to(tl.float32) - mu) * k + beta, slope)
        total += tl.where(inside, a, 0.0)  # outside the map, a is not 0
    tl.store(partial + group * C + c, tl.sum(total, 0), mask=c_mask)


@kernel
def apply(
    x, partial, weight, stats, bias, gate, shortcut, mask, out,
    P, C, splits, chunk, G, merged, slope, eps,
    BP: tl.constexpr, BC: tl.constexpr, AC: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """Write out = relu(gate * act(z) + shortcut) of this program's pixels, without blur.

    Without a shortcut there is no ReLU. A bit of `mask` is 1 where the ReLU passes its input. With
    `partial`, the moments of G groups of `merged` pixels, each program merges these moments, and
    one program for each channel stores `stats`. Otherwise `stats` is given.
    """
    C = aligned(C, AC)
    group, n, start, count, c, c_mask = chunk_of_program(P, C, splits, chunk, BC, True)
    if partial is None:
        mu, k, beta = load_norm(stats, bias, C, c, c_mask)
    else:
        end = tl.where(group == 0, C, 0)
        mean, scale = merge_moments_of(
            c, partial, weight, stats, end, G, C, P, G, merged, eps, BG, BC
        )
        mu, k = mean[None, :], scale[None, :]
        beta = tl.load(bias + c, mask=c_mask, other=0.0).to(tl.float32)[None, :]  # [1, BC]
    if gate is not None:
        gate_row = tl.load(gate + n * C + c, mask=c_mask, other=0.0)[None, :]  # [1, BC]
    first = (n * P + start) * C
    x += first
    out += first
    if shortcut is not None:
        shortcut += first
    for begin in range(0, count, BP):
        p = begin + tl.arange(0, BP)
        inside = (p < count)[:, None] & c_mask[None, :]
        offsets = p[:, None] * C + c
        value = load_once(x + offsets, inside)  # [BP, BC]
        y = activate((value - mu) * k + beta, slope)
        if gate is not None:
            y = y * gate_row
        if shortcut is not None:
            y += load_once(shortcut + offsets, inside)  # [BP, BC]
            y = tl.where(y < 0, 0.0, y)  # NaN stays NaN
        y = y.to(out.dtype.element_ty)
        tl.store(out + offsets, y, mask=inside)
        if mask is not None:
            # as in torch, a gradient passes at NaN (bit 1), but not at a value rounded to 0 (bit 0)
            at, there = bytes_of_tile(n, start + p, p < count, P, C, BC)
            tl.store(mask + at, packed((y <= 0) == 0), mask=there)  # [BP, BC / 8]


@kernel
def grad_sums(
    grad, second_grad, x, mask, gate, stats, bias, masked_grad, rebuilt, partial,
    P, C, splits, chunk, slope,
    BP: tl.constexpr, BC: tl.constexpr, AC: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Write sums over this program's pixels to partial (N * splits, SUMS, C), for BN and SE.

    In this kernel g is the gradient of s: `grad`, plus `second_grad` unless that is None. The first
    two sums are of m g and m g (x - mean). For an SE, sums of m and m (x - mean) follow;
    `merge_grad_sums` multiplies these by the gradient through the SE's mean. With `mask` (see
    `apply`), g is 0 where the ReLU is 0. `masked_grad` is then set to g, for `grad_apply` and the
    shortcut. `rebuilt` is set to the recomputed s, or is None.
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
        gate_row = tl.load(gate + n * C + c, mask=c_mask, other=0.0)[None, :]  # [1, BC]
    if mask is not None:
        at, there = bytes_of_tile(n, start + rows, rows < count, P, C, BC)
        ahead = tl.load(mask + at, mask=there, other=0)  # [BP, BC / 8]
    for begin in tl.range(0, count, BP, num_stages=STAGES):
        p = begin + rows
        inside = (p < count)[:, None] & c_mask[None, :]
        offsets = first + p[:, None] * C + c
        delta = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32) - mu  # [BP, BC]
        g = tl.load(grad + offsets, mask=inside, other=0.0).to(tl.float32)  # [BP, BC]
        if second_grad is not None:
            g += tl.load(second_grad + offsets, mask=inside, other=0.0).to(tl.float32)  # [BP, BC]
        if mask is not None:
            g = tl.where(unpacked(ahead, BP, BC), g, 0.0)
            at, there = bytes_of_tile(n, start + p + BP, p + BP < count, P, C, BC)
            ahead = tl.load(mask + at, mask=there, other=0)  # of the next tile: [BP, BC / 8]
            tl.store(masked_grad + offsets, g.to(masked_grad.dtype.element_ty), mask=inside)
        z = delta * k + beta
        if rebuilt is not None:
            s = activate(z, slope)
            if gate is not None:
                s = s * gate_row
            tl.store(rebuilt + offsets, s.to(rebuilt.dtype.element_ty), mask=inside)
        m = activation_slope(z, slope)
        s1 += m * g
        s2 += m * g * delta
        if SUMS == 4:
            w = tl.where(inside, m, 0.0)  # g is already 0 outside the map
            s3 += w
            s4 += w * delta
    store_sums(partial, group, C, c, c_mask, s1, s2, s3, s4, SUMS)


@kernel
def grad_apply(
    grad, x, gate, squeeze_grad, stats, bias, norm_grads, grad_x,
    P, C, splits, chunk, slope, BP: tl.constexpr, BC: tl.constexpr, AC: tl.constexpr,
):  # fmt: skip
    """Write the gradient scale * m g + k1 * (x - mean) + k0 of this program's pixels of x.

    The last two rows of norm_grads (4, C), from `merge_grad_sums`, are k1 and k0. In eval mode the
    statistics do not depend on x, so norm_grads is None.
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
    first = (n * P + start) * C
    for begin in range(0, count, BP):
        p = begin + tl.arange(0, BP)
        inside = (p < count)[:, None] & c_mask[None, :]
        offsets = first + p[:, None] * C + c
        delta = load_once(x + offsets, inside) - mu  # [BP, BC]
        g = load_once(grad + offsets, inside)  # [BP, BC]
        if gate is not None:
            g = g * gate_row
        if squeeze_grad is not None:
            g += squeeze_row
        result = g * activation_slope(delta * k + beta, slope) * k
        if norm_grads is not None:
            result = result + delta * k1 + k0
        tl.store(grad_x + offsets, result.to(grad_x.dtype.element_ty), mask=inside)
