"""Triton kernels of the sums that batch norm takes over all pixels, forward and backward.

`moments` reads a map for its statistics, and `pointwise_kernels.grad_sums` reads maps for the
gradients. Both write partial sums for each group, which is a chunk of pixels of a sample. Then
`merge_moments` and `merge_grad_sums` merge the G groups. If there are few groups, each program of
`pointwise_kernels.apply` merges the moments instead, because a launch would take longer.
"""

import triton
import triton.language as tl

from tresnet.ops.tile_kernels import STAGES, aligned, chunk_of_program, kernel


@triton.jit
def group_sizes(g, G, P, splits, chunk):
    """Return the number of pixels in each group g (a chunk of a sample), or 0 if g >= G."""
    return tl.where(g < G, tl.minimum(chunk, P - (g % splits) * chunk), 0).to(tl.float32)


@kernel
def moments(x, partial, P, C, splits, chunk, BP: tl.constexpr, BC: tl.constexpr, AC: tl.constexpr):
    """Write mean and sum of squared deviations of a program's pixels to partial (N * splits, 2, C).

    Each row of the tiles has a mean of its own, updated from tile to tile (Welford 1962). A pixel
    far from the mean, such as a map's corner, then cancels in its row alone.
    """
    C = aligned(C, AC)
    group, n, start, count, c, c_mask = chunk_of_program(P, C, splits, chunk, BC)
    x += (n * P + start) * C
    rows = tl.arange(0, BP)
    mean = tl.zeros((BP, BC), tl.float32)
    squares = tl.zeros((BP, BC), tl.float32)
    for begin in tl.range(0, count, BP, num_stages=STAGES):
        p = begin + rows
        mask = (p < count)[:, None] & c_mask[None, :]
        value = tl.load(x + p[:, None] * C + c, mask=mask, other=0.0)  # [BP, BC]
        # a masked value is loaded as 0, but 0 - mean would change the sums
        delta = tl.where(mask, value.to(tl.float32) - mean, 0.0)
        weight = 1.0 / (begin // BP + 1)
        mean += delta * weight
        squares += delta * delta * (1.0 - weight)
    pixels = tl.cdiv(tl.maximum(count - rows, 0), BP).to(tl.float32)[:, None]  # [BP, 1]
    # + 0.0 ends the product. An FMA with the sum of another lane would round one of the two.
    mean_of_chunk = tl.sum(mean * pixels + 0.0, 0) / count
    delta = mean - mean_of_chunk[None, :]
    partial += group * 2 * C + c
    tl.store(partial, mean_of_chunk, mask=c_mask)
    tl.store(partial + C, tl.sum(squares + delta * delta * pixels, 0), mask=c_mask)


@triton.jit
def merge_moments_of(
    c, partial, weight, out, end, G, C, P, splits, chunk, eps, BG: tl.constexpr, BC: tl.constexpr
):
    """Merge the moments of all groups; return mean and scale of the channels c [BC].

    For c < end, out (4, C) is set to mean, scale, invstd and unbiased variance. The moments of each
    group are read twice: first for the mean, then for the deviations from the mean (Chan, Golub and
    LeVeque 1983).
    """
    c_mask = c < C
    groups = tl.arange(0, BG)
    sums = tl.zeros((BG, BC), tl.float32)
    sizes = tl.zeros((BG,), tl.float32)
    for begin in range(0, G, BG):
        g = begin + groups
        n = group_sizes(g, G, P, splits, chunk)
        mask = (g < G)[:, None] & c_mask[None, :]
        mean_g = tl.load(partial + g[:, None] * 2 * C + c, mask=mask, other=0.0)  # [BG, BC]
        sums += mean_g * n[:, None]
        sizes += n
    count = tl.sum(sizes, 0)
    mean = tl.sum(sums, 0) / count
    sums = tl.zeros((BG, BC), tl.float32)
    for begin in range(0, G, BG):
        g = begin + groups
        n = group_sizes(g, G, P, splits, chunk)
        mask = (g < G)[:, None] & c_mask[None, :]
        mean_g = tl.load(partial + g[:, None] * 2 * C + c, mask=mask, other=0.0)  # [BG, BC]
        rest_g = tl.load(partial + (g[:, None] * 2 + 1) * C + c, mask=mask, other=0.0)  # [BG, BC]
        delta = mean_g - mean[None, :]
        sums += rest_g + tl.where(mask, delta * delta * n[:, None], 0.0)
    deviations = tl.sum(sums, 0)
    invstd = 1.0 / tl.sqrt(deviations / count + eps)
    gamma = tl.load(weight + c, mask=c_mask, other=0.0).to(tl.float32)  # [BC]
    scale = gamma * invstd
    c_mask = c < end
    tl.store(out + c, mean, mask=c_mask)
    tl.store(out + C + c, scale, mask=c_mask)
    tl.store(out + 2 * C + c, invstd, mask=c_mask)
    tl.store(out + 3 * C + c, deviations / (count - 1.0), mask=c_mask)
    return mean, scale


@kernel
def merge_moments(
    partial, weight, out, G, C, P, splits, chunk, eps, BG: tl.constexpr, BC: tl.constexpr
):
    """Merge the moments of all groups into out (4, C), as `merge_moments_of` does."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    merge_moments_of(c, partial, weight, out, C, G, C, P, splits, chunk, eps, BG, BC)


@triton.jit
def store_sums(partial, group, C, c, c_mask, s1, s2, s3, s4, SUMS: tl.constexpr):
    """Store 2 or 4 sums over the pixels of tiles [BP, BC] in partial (N * splits, SUMS, C)."""
    partial += group * SUMS * C + c
    tl.store(partial, tl.sum(s1, 0), mask=c_mask)
    tl.store(partial + C, tl.sum(s2, 0), mask=c_mask)
    if SUMS == 4:
        tl.store(partial + 2 * C, tl.sum(s3, 0), mask=c_mask)
        tl.store(partial + 3 * C, tl.sum(s4, 0), mask=c_mask)


@triton.jit
def merge_grad_sums_of(
    c, partial, gate, squeeze_grad, stats, out, G, C, splits, count,
    BG: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Merge the sums of all groups into out (4, C): grad_weight, grad_bias, k1 and k0.

    `grad_apply` multiplies x - mean by k1, and adds k0. The channels are c [BC]. squeeze_grad
    (N, C) is the gradient that each pixel of a map gets through the SE's mean; None without an SE.
    """
    c_mask = c < C
    groups = tl.arange(0, BG)
    s1 = tl.zeros((BG, BC), tl.float32)
    s2 = tl.zeros((BG, BC), tl.float32)
    kinds: tl.constexpr = 2 if squeeze_grad is None else 4
    for begin in range(0, G, BG):
        g = begin + groups
        mask = (g < G)[:, None] & c_mask[None, :]
        offsets = g[:, None] * kinds * C + c
        a1 = tl.load(partial + offsets, mask=mask, other=0.0)  # [BG, BC]
        a2 = tl.load(partial + offsets + C, mask=mask, other=0.0)  # [BG, BC]
        if gate is not None:
            sample = (g // splits)[:, None] * C + c
            gate_g = tl.load(gate + sample, mask=mask, other=0.0)  # [BG, BC]
            a1 = a1 * gate_g
            a2 = a2 * gate_g
            if squeeze_grad is not None:
                term = tl.load(squeeze_grad + sample, mask=mask, other=0.0)  # [BG, BC]
                a1 += tl.load(partial + offsets + 2 * C, mask=mask, other=0.0) * term  # [BG, BC]
                a2 += tl.load(partial + offsets + 3 * C, mask=mask, other=0.0) * term  # [BG, BC]
        s1 += a1
        s2 += a2
    grad_bias = tl.sum(s1, 0)
    invstd = tl.load(stats + 2 * C + c, mask=c_mask, other=0.0)  # [BC]
    grad_weight = tl.sum(s2, 0) * invstd
    tl.store(out + c, grad_weight, mask=c_mask)
    tl.store(out + C + c, grad_bias, mask=c_mask)
    scale = tl.load(stats + C + c, mask=c_mask, other=0.0)  # [BC]
    tl.store(out + 2 * C + c, -scale * invstd * grad_weight / count, mask=c_mask)
    tl.store(out + 3 * C + c, -scale * grad_bias / count, mask=c_mask)


@kernel
def merge_grad_sums(
    partial, gate, stats, out, G, C, splits, count, BG: tl.constexpr, BC: tl.constexpr
):
    """Merge the sums of a norm without SE, as `merge_grad_sums_of` does, for BC channels."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    merge_grad_sums_of(c, partial, gate, None, stats, out, G, C, splits, count, BG, BC)


@triton.jit
def load_coefficients(norm_grads, C, c, c_mask):
    """Return k1 and k0 [1, BC] of the gradient of x."""
    k1 = tl.load(norm_grads + 2 * C + c, mask=c_mask, other=0.0)  # [BC]
    k0 = tl.load(norm_grads + 3 * C + c, mask=c_mask, other=0.0)  # [BC]
    return k1[None, :], k0[None, :]
