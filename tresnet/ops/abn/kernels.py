"""Triton kernels of the forward of batch norm, activation, blur, gate and residual sum.

`tresnet.ops.tiles` explains samples n, pixels p, channels c and their strides. A Triton program
covers a chunk of pixels of one sample and BC channels, and loops over tiles of BP pixels. A kernel
that treats all samples alike gets a channels_last batch as one sample of N * P pixels. A thread can
load AP pixels or AC channels at once. Everything is computed in float32.

Notation: x is the convolution's output, invstd = 1 / sqrt(var + eps), scale = weight * invstd,
z = (x - mean) * scale + bias, a = act(z), b = blur(a), s = gate * b, out = relu(s + shortcut). An
absent operation is the identity: without blur, b = a. If a tensor or `slope` is None, its operation
is absent from the compiled kernel. The batch norm is algorithm 1 of arXiv 1502.03167.
"""

import triton
import triton.language as tl

from tresnet.ops.tiles.kernels import (
    aligned,
    bytes_of_tile,
    chunk_of_program,
    kernel,
    load_norm,
    load_once,
    packed,
    pixel_of_square,
    reflect,
    square_of,
    weights_of_pixel,
)

# A reduction has three pipeline stages: it sums one tile while it loads the next two tiles. With a
# blur, one stage is enough: a tile has many loads, and the cache holds pixels that tiles share.
STAGES = tl.constexpr(3)


@triton.jit
def activate(z, slope):
    """Return the leaky ReLU of z, or z itself if slope is None."""
    if slope is not None:
        z = tl.where(z > 0, z, z * slope)
    return z


@triton.jit
def group_sizes(g, G, P, splits, chunk):
    """Return the number of pixels in each group g (a chunk of a sample), or 0 if g >= G."""
    return tl.where(g < G, tl.minimum(chunk, P - (g % splits) * chunk), 0).to(tl.float32)


@kernel
def moments(x, partial, P, C, splits, chunk, BP: tl.constexpr, BC: tl.constexpr, AC: tl.constexpr):
    """Write mean and sum of squared deviations of a program's pixels to partial (N * splits, 2, C).

    The first pixel is subtracted from all pixels, to avoid cancellation at large means.
    """
    C = aligned(C, AC)
    group, n, start, count, c, c_mask = chunk_of_program(P, C, splits, chunk, BC)
    x += (n * P + start) * C
    pivot = tl.load(x + c, mask=c_mask, other=0.0).to(tl.float32)  # [BC]
    rows = tl.arange(0, BP)
    total = tl.zeros((BP, BC), tl.float32)
    squares = tl.zeros((BP, BC), tl.float32)
    for begin in tl.range(0, count, BP, num_stages=STAGES):
        p = begin + rows
        mask = (p < count)[:, None] & c_mask[None, :]
        value = tl.load(x + p[:, None] * C + c, mask=mask, other=0.0)  # [BP, BC]
        # a masked value is loaded as 0, but 0 - pivot would change the sums
        delta = tl.where(mask, value.to(tl.float32) - pivot[None, :], 0.0)
        total += delta
        squares += delta * delta
    delta = tl.sum(total, 0) / count
    deviations = tl.sum(squares, 0) - delta * delta * count
    partial += group * 2 * C + c
    tl.store(partial, pivot + delta, mask=c_mask)
    # tl.maximum would turn NaN into 0 on a GPU
    tl.store(partial + C, tl.where(deviations < 0, 0.0, deviations), mask=c_mask)


@kernel
def merge_moments(
    partial, weight, out, G, C, P, splits, chunk, eps, BG: tl.constexpr, BC: tl.constexpr
):
    """Merge the moments of all G chunks into out (4, C): mean, scale, invstd, unbiased variance.

    A program covers BC channels. It reads the moments of each chunk twice: first for the mean, then
    for the deviations from the mean (Chan, Golub and LeVeque 1983).
    """
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    c_mask = c < C
    groups = tl.arange(0, BG)
    sums = tl.zeros((BG, BC), tl.float32)
    sizes = tl.zeros((BG,), tl.float32)
    for begin in range(0, G, BG):
        g = begin + groups
        n = group_sizes(g, G, P, splits, chunk)
        mask = (g < G)[:, None] & c_mask[None, :]
        mean_g = tl.load(partial + g[:, None] * 2 * C + c[None, :], mask=mask, other=0.0)
        sums += mean_g * n[:, None]
        sizes += n
    count = tl.sum(sizes, 0)
    mean = tl.sum(sums, 0) / count
    sums = tl.zeros((BG, BC), tl.float32)
    for begin in range(0, G, BG):
        g = begin + groups
        n = group_sizes(g, G, P, splits, chunk)
        mask = (g < G)[:, None] & c_mask[None, :]
        mean_g = tl.load(partial + g[:, None] * 2 * C + c[None, :], mask=mask, other=0.0)
        rest_g = tl.load(partial + (g[:, None] * 2 + 1) * C + c[None, :], mask=mask, other=0.0)
        delta = mean_g - mean[None, :]
        sums += rest_g + tl.where(mask, delta * delta * n[:, None], 0.0)
    deviations = tl.sum(sums, 0)
    invstd = 1.0 / tl.sqrt(deviations / count + eps)
    gamma = tl.load(weight + c, mask=c_mask, other=0.0).to(tl.float32)
    tl.store(out + c, mean, mask=c_mask)
    tl.store(out + C + c, gamma * invstd, mask=c_mask)
    tl.store(out + 2 * C + c, invstd, mask=c_mask)
    tl.store(out + 3 * C + c, deviations / (count - 1.0), mask=c_mask)


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


@kernel
def apply(
    x, stats, bias, gate, shortcut, mask, out, P, C, splits, chunk, slope,
    BP: tl.constexpr, BC: tl.constexpr, AC: tl.constexpr,
):  # fmt: skip
    """Write out = relu(gate * act(z) + shortcut) of this program's pixels, without blur.

    Without a shortcut there is no ReLU. A bit of `mask` is 1 where the ReLU passes its input.
    """
    C = aligned(C, AC)
    _group, n, start, count, c, c_mask = chunk_of_program(P, C, splits, chunk, BC, True)
    mu, k, beta = load_norm(stats, bias, C, c, c_mask)
    if gate is not None:
        factor = tl.load(gate + n * C + c, mask=c_mask, other=0.0)[None, :]  # [1, BC]
    rows = tl.arange(0, BP)
    first = (n * P + start) * C
    x += first
    out += first
    if shortcut is not None:
        shortcut += first
    for begin in range(0, count, BP):
        p = begin + rows
        inside = (p < count)[:, None] & c_mask[None, :]
        offsets = p[:, None] * C + c
        value = load_once(x + offsets, inside)  # [BP, BC]
        y = activate((value - mu) * k + beta, slope)
        if gate is not None:
            y = y * factor
        if shortcut is not None:
            y += load_once(shortcut + offsets, inside)  # [BP, BC]
            y = tl.where(y < 0, 0.0, y)  # NaN stays NaN
        y = y.to(out.dtype.element_ty)
        tl.store(out + offsets, y, mask=inside)
        if mask is not None:
            # as in torch, a gradient passes at NaN (bit 1), but not at a value rounded to 0 (bit 0)
            at, there = bytes_of_tile(n, start + p, p < count, P, C, BC)
            tl.store(mask + at, packed((y <= 0) == 0), mask=there)  # [BP, BC / 8]


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


@triton.jit
def load_activated(x, w, mask, W, C, mu, k, beta, slope):
    """Return act(z), z = (x - mu) * k + beta, at column w of a row; a w outside is reflected."""
    value = tl.load(x + reflect(w, W)[:, None] * C, mask=mask, other=0.0)  # [BP, BC]
    return activate((value.to(tl.float32) - mu) * k + beta, slope)


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
        factor = tl.load(gate + n * C + c, mask=c_mask, other=0.0)[None, :]  # [1, BC]
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
                left, right = left * factor, right * factor
            to = out + ((2 * i + half) * WO + 2 * j)[:, None] * C + c  # [BP, BC]
            tl.store(to, left.to(out.dtype.element_ty), mask=below)
            tl.store(to + C, right.to(out.dtype.element_ty), mask=below & beside)
            left0, right0 = left2, right2
