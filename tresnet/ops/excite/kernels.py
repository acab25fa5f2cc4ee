"""Triton kernels of squeeze and excitation (arXiv 1709.01507) between two passes over the maps.

N samples, C channels, R hidden units. In `excite` and `excite_grads` a program covers BN samples
and goes through the weights in tiles of BI rows and BJ columns. In `excite_weight_grads` it covers
a tile of the weights and goes through the samples. One kernel serves all widths. Everything is
float32.
"""

import triton
import triton.language as tl

from tresnet.ops.tiles.kernels import kernel, load_norm


@triton.jit
def load_matrix(x, rows, columns, ROWS, COLUMNS):
    """Load a tile of a dense matrix in float32, zero beyond its ends."""
    mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    return tl.load(x + rows[:, None] * COLUMNS + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_matrix(x, value, rows, columns, ROWS, COLUMNS):
    """Store the part of a tile that lies inside a dense matrix."""
    mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    tl.store(x + rows[:, None] * COLUMNS + columns, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def by_rows(total, x, weight):
    """Return `total + x weight^T` for x (BN, BJ), weight (BI, BJ): too small for tensor cores."""
    return total + tl.sum(x[:, None, :] * weight[None, :, :], 2)


@triton.jit
def by_columns(total, x, weight):
    """Return `total + x weight` for x (BN, BI), weight (BI, BJ)."""
    return total + tl.sum(x[:, :, None] * weight[None, :, :], 1)


@kernel
def excite(
    partial, stats, bias, fc1, fc1_bias, fc2, fc2_bias, squeezed, hidden, gate, N, C, R, P, splits,
    chunk, LINEAR: tl.constexpr, BN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Write squeezed (N, C), hidden (N, R) and gate (N, C) = sigmoid(fc2 relu(fc1 squeezed)).

    Both layers have biases; fc1 is (R, C), fc2 (C, R). partial (N * splits, C) holds the sums of
    the squeezed maps over chunks of their P pixels (equation 2). With LINEAR it is (N * splits, 2,
    C) of `moments`: the means of x, from which those of z follow.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    kinds: tl.constexpr = 2 if LINEAR else 1
    for begin in range(0, C, BJ):
        c = begin + tl.arange(0, BJ)
        mask = (n < N)[:, None] & (c < C)[None, :]
        total = tl.zeros((BN, BJ), tl.float32)
        for s in range(0, splits):
            at = partial + (n * splits + s)[:, None] * kinds * C + c[None, :]
            value = tl.load(at, mask=mask, other=0.0)
            if LINEAR:
                value *= tl.minimum(chunk, P - s * chunk).to(tl.float32)
            total += value
        value = total / P
        if LINEAR:
            mu, k, beta = load_norm(stats, bias, C, c, c < C)
            value = (value - mu) * k + beta
        store_matrix(squeezed, value, n, c, N, C)
    tl.debug_barrier()  # threads read values that other threads of this program have written
    for row in range(0, R, BI):
        r = row + tl.arange(0, BI)
        total = tl.zeros((BN, BI), tl.float32)
        for begin in range(0, C, BJ):
            c = begin + tl.arange(0, BJ)
            total = by_rows(total, load_matrix(squeezed, n, c, N, C), load_matrix(fc1, r, c, R, C))
        total += tl.load(fc1_bias + r, mask=r < R, other=0.0).to(tl.float32)[None, :]
        store_matrix(hidden, tl.where(total <= 0, 0.0, total), n, r, N, R)  # NaN stays
    tl.debug_barrier()
    for row in range(0, C, BI):
        c = row + tl.arange(0, BI)
        total = tl.zeros((BN, BI), tl.float32)
        for begin in range(0, R, BJ):
            r = begin + tl.arange(0, BJ)
            total = by_rows(total, load_matrix(hidden, n, r, N, R), load_matrix(fc2, c, r, C, R))
        total += tl.load(fc2_bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        store_matrix(gate, tl.sigmoid(total), n, c, N, C)


@kernel
def excite_grads(
    partial, stats, bias, gate, hidden, fc1, fc2, grad_logit, grad_hidden, squeeze_grad,
    N, C, R, splits, count, BN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Write the gradients of both layers' outputs, and squeeze_grad (N, C).

    squeeze_grad is the gradient of the squeeze divided by `count`, the pixels of a mean. The gate's
    gradient is the sum of g * act(z), where act(z) = m * ((x - mean) * scale + bias). It follows
    from the sums of `grad_sums` in partial, without another pass over the maps.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    for begin in range(0, C, BJ):
        c = begin + tl.arange(0, BJ)
        mask = (n < N)[:, None] & (c < C)[None, :]
        s1 = tl.zeros((BN, BJ), tl.float32)
        s2 = tl.zeros((BN, BJ), tl.float32)
        for s in range(0, splits):
            at = partial + (n * splits + s)[:, None] * 4 * C + c[None, :]
            s1 += tl.load(at, mask=mask, other=0.0)
            s2 += tl.load(at + C, mask=mask, other=0.0)
        k = tl.load(stats + C + c, mask=c < C, other=0.0)[None, :]
        beta = tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        g = load_matrix(gate, n, c, N, C)
        store_matrix(grad_logit, (s1 * beta + s2 * k) * (1.0 - g) * g, n, c, N, C)
    tl.debug_barrier()
    for begin in range(0, R, BJ):
        r = begin + tl.arange(0, BJ)
        total = tl.zeros((BN, BJ), tl.float32)
        for row in range(0, C, BI):
            c = row + tl.arange(0, BI)
            grad = load_matrix(grad_logit, n, c, N, C)
            total = by_columns(total, grad, load_matrix(fc2, c, r, C, R))
        total = tl.where(load_matrix(hidden, n, r, N, R) <= 0, 0.0, total)
        store_matrix(grad_hidden, total, n, r, N, R)
    tl.debug_barrier()
    for begin in range(0, C, BJ):
        c = begin + tl.arange(0, BJ)
        total = tl.zeros((BN, BJ), tl.float32)
        for row in range(0, R, BI):
            r = row + tl.arange(0, BI)
            grad = load_matrix(grad_hidden, n, r, N, R)
            total = by_columns(total, grad, load_matrix(fc1, r, c, R, C))
        store_matrix(squeeze_grad, total / count, n, c, N, C)


@triton.jit
def weight_grad(grad, x, weight, bias, N, ROWS, COLUMNS, BN: tl.constexpr, BW: tl.constexpr):
    """Write a square tile of grad^T x to weight (ROWS, COLUMNS), and sums of grad to bias."""
    columns = tl.cdiv(COLUMNS, BW)
    i = (tl.program_id(0) // columns) * BW + tl.arange(0, BW)
    j = (tl.program_id(0) % columns) * BW + tl.arange(0, BW)
    total = tl.zeros((BW, BW), tl.float32)
    sums = tl.zeros((BW,), tl.float32)
    for begin in range(0, N, BN):
        n = begin + tl.arange(0, BN)
        outer = load_matrix(grad, n, i, N, ROWS)
        inner = load_matrix(x, n, j, N, COLUMNS)
        # tensor cores multiply float32 as three products of TF32
        total = tl.dot(tl.trans(outer), inner, acc=total, input_precision="tf32x3")
        sums += tl.sum(outer, 0)
    store_matrix(weight, total, i, j, ROWS, COLUMNS)
    if tl.program_id(0) % columns == 0:
        tl.store(bias + i, sums.to(bias.dtype.element_ty), mask=i < ROWS)


@kernel
def excite_weight_grads(
    squeezed, hidden, grad_logit, grad_hidden, fc1, fc1_bias, fc2, fc2_bias, N, C, R,
    BN: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Write the gradients of both layers' weights and biases to fc1, fc1_bias and so on."""
    if tl.program_id(1) == 0:
        weight_grad(grad_hidden, squeezed, fc1, fc1_bias, N, R, C, BN, BW)
    else:
        weight_grad(grad_logit, hidden, fc2, fc2_bias, N, C, R, BN, BW)
