"""Triton kernels of the activated batch norm and of the operations after it: blur, gate, shortcut.

A kernel views a batch as samples n, pixels p and channels c, with one stride for each. So one
kernel reads both channels_last memory (c has stride 1) and contiguous memory (p has stride 1) in
the order of addresses. A program covers a chunk of pixels of one sample and BC channels, and loops
over tiles of BP pixels. Where samples need not be told apart, a channels_last batch is passed as
one sample of N * P pixels. AP divides the number of pixels, and AC divides the number of channels,
so that a thread may load AP or AC values at once. Everything is computed in float32.

Notation: x is the convolution's output, invstd = 1 / sqrt(var + eps), scale = weight * invstd,
z = (x - mean) * scale + bias, a = act(z), b = blur(a), s = gate * b, out = relu(s + shortcut). An
absent operation is the identity: without blur, b = a. `count` is the number of values per channel.
Forward is algorithm 1 of arXiv 1502.03167, and backward has the equations of its section 3:

    m = act'(z), g = transposed blur of (gate * gradient of s + gradient through the squeeze)
    grad_bias = sum m g                  grad_weight = sum m g (x - mean) * invstd
    grad_x = scale * (m g - grad_bias / count - (x - mean) * invstd * grad_weight / count)
           = scale * m g + k1 * (x - mean) + k0
"""

import triton
import triton.language as tl

from tresnet.ops.tiles.kernels import (
    aligned,
    aligned_strides,
    bytes_of_tile,
    chunk_of_program,
    kernel,
    load_norm,
    load_once,
    load_square_gradients,
    packed,
    pixel_of_square,
    reflect,
    square_of,
    transposed_blur_at,
    unpacked,
    weights_of_pixel,
)

# A reduction has three pipeline stages: it sums one tile while it loads the next two tiles. With a
# blur it has one stage, because a tile has many loads, and the cache holds pixels that tiles share.
STAGES = tl.constexpr(3)


@triton.jit
def activate(z, slope, HAS_ACT: tl.constexpr):
    """Return the leaky ReLU of z, or z itself if HAS_ACT is false."""
    if HAS_ACT:
        z = tl.where(z > 0, z, z * slope)
    return z


@triton.jit
def activation_slope(z, slope, HAS_ACT: tl.constexpr):
    """Return the derivative m of the activation at z, for which act(z) = m * z."""
    m = tl.full(z.shape, 1.0, tl.float32)
    if HAS_ACT:
        m = tl.where(z > 0, m, slope)
    return m


@triton.jit
def group_sizes(g, G, P, splits, chunk):
    """Return the number of pixels in each group g (a chunk of a sample), or 0 if g >= G."""
    return tl.where(g < G, tl.minimum(chunk, P - (g % splits) * chunk), 0).to(tl.float32)


@kernel
def moments(
    x, partial, P, C, xn, xp, xc, splits, chunk,
    BP: tl.constexpr, BC: tl.constexpr, AP: tl.constexpr, AC: tl.constexpr,
):  # fmt: skip
    """Write a chunk's mean and sum of squared deviations to a row of partial (N * splits, 2, C).

    The chunk's first pixel is subtracted from all its pixels, to avoid cancellation at large means.
    """
    P, C = aligned(P, AP), aligned(C, AC)
    xn, xp, xc = aligned_strides(xn, xp, xc, AP, AC)
    group, n, start, count, c, known = chunk_of_program(P, C, splits, chunk, BC, AP, AC)
    x += n * xn + start.to(tl.int64) * xp
    pivot = tl.load(x + c * xc, mask=known, other=0.0).to(tl.float32)
    rows = tl.arange(0, BP)
    total = tl.zeros((BP, BC), tl.float32)
    squares = tl.zeros((BP, BC), tl.float32)
    for begin in tl.range(0, count, BP, num_stages=STAGES):
        p = begin + rows
        mask = (p < count)[:, None] & known[None, :]
        value = tl.load(x + p[:, None] * xp + c[None, :] * xc, mask=mask, other=0.0)
        # a masked value is loaded as 0, but 0 - pivot would change the sums
        delta = tl.where(mask, value.to(tl.float32) - pivot[None, :], 0.0)
        total += delta
        squares += delta * delta
    delta = tl.sum(total, 0) / count
    deviations = tl.sum(squares, 0) - delta * delta * count
    partial += group * 2 * C + c
    tl.store(partial, pivot + delta, mask=known)
    # tl.maximum would drop NaN on a GPU
    tl.store(partial + C, tl.where(deviations < 0, 0.0, deviations), mask=known)


@kernel
def merge_moments(
    partial, weight, running_mean, running_var, out, G, C, P, splits, chunk, momentum, eps,
    UPDATE: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Merge the moments of all G chunks into out (4, C): mean, scale, invstd, var.

    A program covers BC channels and reads all chunks twice: first for the mean, then for the
    deviations from the mean (Chan, Golub and LeVeque 1983).
    """
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    known = c < C
    groups = tl.arange(0, BG)
    sums = tl.zeros((BG, BC), tl.float32)
    sizes = tl.zeros((BG,), tl.float32)
    for begin in range(0, G, BG):
        g = begin + groups
        n = group_sizes(g, G, P, splits, chunk)
        mask = (g < G)[:, None] & known[None, :]
        mean_g = tl.load(partial + g[:, None] * 2 * C + c[None, :], mask=mask, other=0.0)
        sums += mean_g * n[:, None]
        sizes += n
    count = tl.sum(sizes, 0)
    mean = tl.sum(sums, 0) / count
    sums = tl.zeros((BG, BC), tl.float32)
    for begin in range(0, G, BG):
        g = begin + groups
        n = group_sizes(g, G, P, splits, chunk)
        mask = (g < G)[:, None] & known[None, :]
        mean_g = tl.load(partial + g[:, None] * 2 * C + c[None, :], mask=mask, other=0.0)
        rest_g = tl.load(partial + (g[:, None] * 2 + 1) * C + c[None, :], mask=mask, other=0.0)
        delta = mean_g - mean[None, :]
        sums += rest_g + tl.where(mask, delta * delta * n[:, None], 0.0)
    deviations = tl.sum(sums, 0)
    var = deviations / count
    invstd = 1.0 / tl.sqrt(var + eps)
    gamma = tl.load(weight + c, mask=known, other=0.0).to(tl.float32)
    tl.store(out + c, mean, mask=known)
    tl.store(out + C + c, gamma * invstd, mask=known)
    tl.store(out + 2 * C + c, invstd, mask=known)
    tl.store(out + 3 * C + c, var, mask=known)
    if UPDATE:
        old = tl.load(running_mean + c, mask=known, other=0.0).to(tl.float32)
        tl.store(running_mean + c, old + momentum * (mean - old), mask=known)
        old = tl.load(running_var + c, mask=known, other=0.0).to(tl.float32)
        unbiased = deviations / (count - 1.0)
        tl.store(running_var + c, old + momentum * (unbiased - old), mask=known)


@kernel
def running_moments(weight, running_mean, running_var, out, C, eps, BC: tl.constexpr):
    """Write mean, scale, invstd and var to out (4, C), from the running statistics."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    known = c < C
    var = tl.load(running_var + c, mask=known, other=1.0).to(tl.float32)
    invstd = 1.0 / tl.sqrt(var + eps)
    gamma = tl.load(weight + c, mask=known, other=0.0).to(tl.float32)
    mean = tl.load(running_mean + c, mask=known, other=0.0).to(tl.float32)
    tl.store(out + c, mean, mask=known)
    tl.store(out + C + c, gamma * invstd, mask=known)
    tl.store(out + 2 * C + c, invstd, mask=known)
    tl.store(out + 3 * C + c, var, mask=known)


@kernel
def squeeze(
    x, stats, bias, partial, P, C, H, W, HO, WO, xn, xp, xc, splits, chunk, slope,
    HAS_ACT: tl.constexpr, BLUR: tl.constexpr, NORM: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, AP: tl.constexpr, AC: tl.constexpr,
):  # fmt: skip
    """Write the sum of b = blur(act(z)) over a chunk to a row of partial (N * splits, C).

    With BLUR, P is the number of pixels of b. A program reads four pixels of x for each pixel of b.
    """
    P, C = aligned(P, AP), aligned(C, AC)
    xn, xp, xc = aligned_strides(xn, xp, xc, AP, AC)
    group, n, start, count, c, known = chunk_of_program(P, C, splits, chunk, BC, AP, AC)
    x += n * xn if BLUR else n * xn + start.to(tl.int64) * xp
    mu, k, beta = load_norm(stats, bias, C, c, known, NORM)
    rows = tl.arange(0, BP)
    total = tl.zeros((BP, BC), tl.float32)
    for begin in tl.range(0, count, BP, num_stages=1 if BLUR else STAGES):
        p = begin + rows
        mask = (p < count)[:, None] & known[None, :]
        if BLUR:
            i, j, u0, u1, v0, v1 = square_of(start + p, H, W, HO, WO)
        for corner in tl.static_range(4 if BLUR else 1):
            at, inside = p, mask
            if BLUR:
                at, inside = pixel_of_square(i, j, mask, H, W, corner // 2, corner % 2)
            value = tl.load(x + at[:, None] * xp + c[None, :] * xc, mask=inside, other=0.0)
            a = activate((value.to(tl.float32) - mu) * k + beta, slope, HAS_ACT)
            if BLUR:
                a = a * weights_of_pixel(u0, u1, v0, v1, corner // 2, corner % 2)
            total += tl.where(inside, a, 0.0)  # outside the map, a is not 0
    tl.store(partial + group * C + c, tl.sum(total, 0), mask=known)


@kernel
def apply(
    x, stats, bias, gate, shortcut, out, bits, P, C, xn, xp, xc, splits, chunk, slope,
    HAS_ACT: tl.constexpr, HAS_GATE: tl.constexpr, JOIN: tl.constexpr, BITS: tl.constexpr,
    NORM: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, AP: tl.constexpr, AC: tl.constexpr,
):  # fmt: skip
    """Write a chunk of out for a layer without blur; x is read once.

    With JOIN, the shortcut is added, and a ReLU is applied. Unless BITS is 0, `bits` gets the
    ReLU's mask. A byte of `bits` holds the mask of 8 channels (BITS is 1) or 8 pixels (BITS is 2).
    """
    P, C = aligned(P, AP), aligned(C, AC)
    xn, xp, xc = aligned_strides(xn, xp, xc, AP, AC)
    _group, n, start, count, c, known = chunk_of_program(P, C, splits, chunk, BC, AP, AC, True)
    mu, k, beta = load_norm(stats, bias, C, c, known, NORM)
    if HAS_GATE:
        factor = tl.load(gate + n * C + c, mask=known, other=0.0)[None, :]
    rows = tl.arange(0, BP)
    first = n * xn + start.to(tl.int64) * xp
    x += first
    out += first
    shortcut += first
    for begin in range(0, count, BP):
        p = begin + rows
        mask = (p < count)[:, None] & known[None, :]
        offsets = p[:, None] * xp + c[None, :] * xc
        value = load_once(x + offsets, mask)
        y = activate((value - mu) * k + beta, slope, HAS_ACT)
        if HAS_GATE:
            y = y * factor
        if JOIN:
            y += load_once(shortcut + offsets, mask)
            y = tl.where(y < 0, 0.0, y)  # keeps NaN
        y = y.to(out.dtype.element_ty)
        tl.store(out + offsets, y, mask=mask)
        if BITS:
            # as in torch's ReLU, the bit is 1 for NaN; it is 0 for a value that was rounded to 0
            at, inside = bytes_of_tile(n, start, begin, count, P, C, c, known, BITS, BP, BC)
            tl.store(bits + at, packed((y <= 0) == 0, BITS), mask=inside)


@triton.jit
def blurred_rows(x, line, j, c, mask, right, W, xp, xc, mu, k, beta, slope, HAS_ACT: tl.constexpr):
    """Return sums of a row's activated pixels for the output columns 2 j and 2 j + 1.

    A sum weights three pixels by 1, 2, 1. The first sum reads the columns 4 j - 1 to 4 j + 1. The
    second sum reads the columns 4 j + 1 to 4 j + 3, and is correct only where `right` is true.
    """
    x += line[:, None] * xp + c[None, :] * xc
    first = load_activated(x, 4 * j - 1, mask, W, xp, mu, k, beta, slope, HAS_ACT)
    second = load_activated(x, 4 * j, mask, W, xp, mu, k, beta, slope, HAS_ACT)
    third = load_activated(x, 4 * j + 1, mask, W, xp, mu, k, beta, slope, HAS_ACT)
    mask = mask & right
    fourth = load_activated(x, 4 * j + 2, mask, W, xp, mu, k, beta, slope, HAS_ACT)
    fifth = load_activated(x, 4 * j + 3, mask, W, xp, mu, k, beta, slope, HAS_ACT)
    return first + 2.0 * second + third, third + 2.0 * fourth + fifth


@triton.jit
def load_activated(x, w, mask, W, xp, mu, k, beta, slope, HAS_ACT: tl.constexpr):
    """Return the activation at column w of a row of x; w is reflected at the border."""
    value = tl.load(x + reflect(w, W)[:, None] * xp, mask=mask, other=0.0).to(tl.float32)
    return activate((value - mu) * k + beta, slope, HAS_ACT)


@kernel
def apply_blurred(
    x, stats, bias, gate, out, P, C, H, W, HO, WO,
    xn, xp, xc, on, op, oc, splits, chunk, slope,
    HAS_ACT: tl.constexpr, HAS_GATE: tl.constexpr, NORM: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, AP: tl.constexpr, AC: tl.constexpr,
):  # fmt: skip
    """Write a chunk of out for a layer with blur; P is the number of squares of 2 x 2 outputs.

    A square activates 25 pixels of x. Four outputs computed separately would activate 36 pixels.
    """
    P, C = aligned(P, AP), aligned(C, AC)
    xn, xp, xc = aligned_strides(xn, xp, xc, AP, AC)
    on, op, oc = aligned_strides(on, op, oc, AP, AC)
    _group, n, start, count, c, known = chunk_of_program(P, C, splits, chunk, BC, AP, AC, True)
    mu, k, beta = load_norm(stats, bias, C, c, known, NORM)
    if HAS_GATE:
        factor = tl.load(gate + n * C + c, mask=known, other=0.0)[None, :]
    x += n * xn
    out += n * on
    for begin in range(0, count, BP):
        p = begin + tl.arange(0, BP)
        mask = (p < count)[:, None] & known[None, :]
        i, j = (start + p) // ((WO + 1) // 2), (start + p) % ((WO + 1) // 2)
        lower, beside = mask & (2 * i + 1 < HO)[:, None], (2 * j + 1 < WO)[:, None]
        line = reflect(4 * i - 1, H) * W
        left0, right0 = blurred_rows(
            x, line, j, c, mask, beside, W, xp, xc, mu, k, beta, slope, HAS_ACT
        )
        for half in tl.static_range(2):
            below = lower if half else mask
            line = reflect(4 * i + 2 * half, H) * W
            left1, right1 = blurred_rows(
                x, line, j, c, below, beside, W, xp, xc, mu, k, beta, slope, HAS_ACT
            )
            line = reflect(4 * i + 2 * half + 1, H) * W
            left2, right2 = blurred_rows(
                x, line, j, c, below, beside, W, xp, xc, mu, k, beta, slope, HAS_ACT
            )
            left = (left0 + 2.0 * left1 + left2) * 0.0625
            right = (right0 + 2.0 * right1 + right2) * 0.0625
            if HAS_GATE:
                left, right = left * factor, right * factor
            to = out + ((2 * i + half) * WO + 2 * j)[:, None] * op + c[None, :] * oc
            tl.store(to, left.to(out.dtype.element_ty), mask=below)
            tl.store(to + op, right.to(out.dtype.element_ty), mask=below & beside)
            left0, right0 = left2, right2


@kernel
def grad_sums(
    grad, second_grad, x, bits, gate, stats, bias, written, partial, P, C, H, W, HO, WO,
    xn, xp, xc, on, op, oc, splits, chunk, slope,
    HAS_ACT: tl.constexpr, BLUR: tl.constexpr, HAS_GATE: tl.constexpr, JOIN: tl.constexpr,
    SECOND: tl.constexpr, AGAIN: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, AP: tl.constexpr, AC: tl.constexpr,
):  # fmt: skip
    """Write a chunk's sums for the backward of BN and SE to partial (N * splits, 2 or 4, C).

    The docstring of this file defines z, s and m. Its g includes the gate and the squeeze, but in
    this kernel g is only the transposed blur of the gradient of s. Two rows of `partial` are the
    sums of m g and of m g (x - mean). HAS_GATE adds the sums of m w and of m w (x - mean), where w
    is the transposed blur of ones. With SECOND, the gradient of the output is `grad + second_grad`.
    If JOIN is 1 or 2, this gradient is masked by the ReLU and stored in `written`, for `grad_apply`
    and the shortcut. A byte of `bits` then holds the mask of 8 channels (JOIN is 1) or of 8 pixels
    (JOIN is 2). With AGAIN, s is recomputed and stored in `written`; JOIN and BLUR must be off.
    With BLUR, P is the number of pixels of `grad`. A program reads four pixels of x for each.
    """
    P, C = aligned(P, AP), aligned(C, AC)
    xn, xp, xc = aligned_strides(xn, xp, xc, AP, AC)
    on, op, oc = aligned_strides(on, op, oc, AP, AC)
    group, n, start, count, c, known = chunk_of_program(P, C, splits, chunk, BC, AP, AC)
    mu, k, beta = load_norm(stats, bias, C, c, known)
    rows = tl.arange(0, BP)
    s1 = tl.zeros((BP, BC), tl.float32)
    s2 = tl.zeros((BP, BC), tl.float32)
    s3 = tl.zeros((BP, BC), tl.float32)
    s4 = tl.zeros((BP, BC), tl.float32)
    first = n * xn if BLUR else n * xn + start.to(tl.int64) * xp
    x += first
    written += first
    grad += n * on if BLUR else first
    second_grad += first
    if AGAIN and HAS_GATE:
        factor = tl.load(gate + n * C + c, mask=known, other=0.0)[None, :]
    if JOIN:
        to, there = bytes_of_tile(n, start, 0, count, P, C, c, known, JOIN, BP, BC)
        ahead = tl.load(bits + to, mask=there, other=0)
    for begin in tl.range(0, count, BP, num_stages=1 if BLUR else STAGES):
        p = begin + rows
        mask = (p < count)[:, None] & known[None, :]
        if BLUR:
            i, j, u0, u1, v0, v1 = square_of(start + p, H, W, HO, WO)
            t00, t01, t10, t11 = load_square_gradients(grad, start + p, c, mask, u1, v1, WO, op, oc)
        for corner in tl.static_range(4 if BLUR else 1):
            at, inside = p, mask
            if BLUR:
                at, inside = pixel_of_square(i, j, mask, H, W, corner // 2, corner % 2)
            offsets = at[:, None] * xp + c[None, :] * xc
            delta = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32) - mu
            if BLUR:
                g = transposed_blur_at(t00, t01, t10, t11, u0, u1, v0, v1, corner // 2, corner % 2)
            else:
                g = tl.load(grad + offsets, mask=inside, other=0.0).to(tl.float32)
            if SECOND:
                g += tl.load(second_grad + offsets, mask=inside, other=0.0).to(tl.float32)
            if JOIN:
                g = tl.where(unpacked(ahead, JOIN, BP, BC), g, 0.0)
                to, there = bytes_of_tile(n, start, begin + BP, count, P, C, c, known, JOIN, BP, BC)
                ahead = tl.load(bits + to, mask=there, other=0)  # the next tile's bits
                tl.store(written + offsets, g.to(written.dtype.element_ty), mask=inside)
            if AGAIN:
                s = activate(delta * k + beta, slope, HAS_ACT)
                if HAS_GATE:
                    s = s * factor
                tl.store(written + offsets, s.to(written.dtype.element_ty), mask=inside)
            m = activation_slope(delta * k + beta, slope, HAS_ACT)
            s1 += m * g
            s2 += m * g * delta
            if HAS_GATE:
                w = tl.where(inside, m, 0.0)  # g is already 0 outside the map
                if BLUR:
                    w = w * weights_of_pixel(u0, u1, v0, v1, corner // 2, corner % 2)
                s3 += w
                s4 += w * delta
    kinds: tl.constexpr = 4 if HAS_GATE else 2
    partial += group * kinds * C + c
    tl.store(partial, tl.sum(s1, 0), mask=known)
    tl.store(partial + C, tl.sum(s2, 0), mask=known)
    if HAS_GATE:
        tl.store(partial + 2 * C, tl.sum(s3, 0), mask=known)
        tl.store(partial + 3 * C, tl.sum(s4, 0), mask=known)


@kernel
def merge_grad_sums(
    partial, gate, squeeze_grad, stats, out, G, C, splits, count,
    HAS_GATE: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Merge the sums of all G chunks into out (4, C): grad_weight, grad_bias, k1 and k0.

    A program covers BC channels. `merge_moments` or `running_moments` wrote stats (4, C).
    squeeze_grad (N, C) is the gradient that each pixel of a map gets through the squeeze.
    """
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    known = c < C
    groups = tl.arange(0, BG)
    s1 = tl.zeros((BG, BC), tl.float32)
    s2 = tl.zeros((BG, BC), tl.float32)
    kinds: tl.constexpr = 4 if HAS_GATE else 2
    for begin in range(0, G, BG):
        g = begin + groups
        mask = (g < G)[:, None] & known[None, :]
        offsets = g[:, None] * kinds * C + c[None, :]
        a1 = tl.load(partial + offsets, mask=mask, other=0.0)
        a2 = tl.load(partial + offsets + C, mask=mask, other=0.0)
        if HAS_GATE:
            sample = (g // splits)[:, None] * C + c[None, :]
            factor = tl.load(gate + sample, mask=mask, other=0.0)
            term = tl.load(squeeze_grad + sample, mask=mask, other=0.0)
            a3 = tl.load(partial + offsets + 2 * C, mask=mask, other=0.0)
            a4 = tl.load(partial + offsets + 3 * C, mask=mask, other=0.0)
            a1 = a1 * factor + a3 * term
            a2 = a2 * factor + a4 * term
        s1 += a1
        s2 += a2
    grad_bias = tl.sum(s1, 0)
    invstd = tl.load(stats + 2 * C + c, mask=known, other=0.0)
    grad_weight = tl.sum(s2, 0) * invstd
    tl.store(out + c, grad_weight, mask=known)
    tl.store(out + C + c, grad_bias, mask=known)
    scale = tl.load(stats + C + c, mask=known, other=0.0)
    tl.store(out + 2 * C + c, -scale * invstd * grad_weight / count, mask=known)
    tl.store(out + 3 * C + c, -scale * grad_bias / count, mask=known)


@kernel
def grad_apply(
    grad, x, stats, bias, gate, squeeze_grad, merged, grad_x, P, C, H, W, HO, WO,
    xn, xp, xc, on, op, oc, splits, chunk, slope,
    HAS_ACT: tl.constexpr, BLUR: tl.constexpr, HAS_GATE: tl.constexpr, TRAINING: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, AP: tl.constexpr, AC: tl.constexpr,
):  # fmt: skip
    """Write a chunk of the gradient of x: scale * m g + k1 * (x - mean) + k0.

    `merge_grad_sums` wrote merged (4, C), whose last two rows are k1 and k0. Without TRAINING, the
    statistics do not depend on x, so k1 and k0 are not used. With BLUR, P is the number of pixels
    of grad. A program then covers four pixels of x for each pixel of grad.
    """
    P, C = aligned(P, AP), aligned(C, AC)
    xn, xp, xc = aligned_strides(xn, xp, xc, AP, AC)
    on, op, oc = aligned_strides(on, op, oc, AP, AC)
    _group, n, start, count, c, known = chunk_of_program(P, C, splits, chunk, BC, AP, AC, True)
    mu, k, beta = load_norm(stats, bias, C, c, known)
    if TRAINING:
        k1 = tl.load(merged + 2 * C + c, mask=known, other=0.0)[None, :]
        k0 = tl.load(merged + 3 * C + c, mask=known, other=0.0)[None, :]
    if HAS_GATE:
        factor = tl.load(gate + n * C + c, mask=known, other=0.0)[None, :]
        term = tl.load(squeeze_grad + n * C + c, mask=known, other=0.0)[None, :]
    rows = tl.arange(0, BP)
    first = n * xn if BLUR else n * xn + start.to(tl.int64) * xp
    x += first
    grad += n * on if BLUR else first
    grad_x += first
    for begin in range(0, count, BP):
        p = begin + rows
        mask = (p < count)[:, None] & known[None, :]
        if BLUR:
            i, j, u0, u1, v0, v1 = square_of(start + p, H, W, HO, WO)
            t00, t01, t10, t11 = load_square_gradients(grad, start + p, c, mask, u1, v1, WO, op, oc)
        for corner in tl.static_range(4 if BLUR else 1):
            at, inside = p, mask
            if BLUR:
                at, inside = pixel_of_square(i, j, mask, H, W, corner // 2, corner % 2)
            offsets = at[:, None] * xp + c[None, :] * xc
            delta = load_once(x + offsets, inside) - mu
            if BLUR:
                g = transposed_blur_at(t00, t01, t10, t11, u0, u1, v0, v1, corner // 2, corner % 2)
            else:
                g = load_once(grad + offsets, inside)
            if HAS_GATE:
                part = term
                if BLUR:
                    part = term * weights_of_pixel(u0, u1, v0, v1, corner // 2, corner % 2)
                g = g * factor + part
            g = g * activation_slope(delta * k + beta, slope, HAS_ACT)
            result = g * k
            if TRAINING:
                result = result + delta * k1 + k0
            tl.store(grad_x + offsets, result.to(grad_x.dtype.element_ty), mask=inside)
