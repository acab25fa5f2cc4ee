"""Triton kernels of the two linear layers of squeeze and excitation (arXiv 1709.01507).

There are N samples, C channels and R hidden units. A program of `excite` or `excite_grads` covers
BN samples, and loops over the weights in tiles of BI rows and BJ columns. A program of
`excite_weight_grads` covers a tile of the weights, and loops over the samples. A compiled kernel
serves all N, C and R. Everything is computed in float32.
"""

import triton
import triton.language as tl

from tresnet.ops.tiles.kernels import kernel, load_norm


@triton.jit
def load_matrix(x, rows, columns, ROWS, COLUMNS):
    """Load a tile of a dense matrix as float32, with zeros outside the matrix."""
    mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    return tl.load(x + rows[:, None] * COLUMNS + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_matrix(x, value, rows, columns, ROWS, COLUMNS):
    """Store the part of a tile that lies inside a dense matrix."""
    mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    tl.store(x + rows[:, None] * COLUMNS + columns, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def linear(
    x, weight, bias, n, i, N, ROWS, COLUMNS,
    BN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Return columns i of x @ weight^T + bias for samples n; tensor cores would need BN >= 16."""
    total = tl.zeros((BN, BI), tl.float32)
    for begin in range(0, COLUMNS, BJ):
        j = begin + tl.arange(0, BJ)
        values = load_matrix(x, n, j, N, COLUMNS)
        total += tl.sum(
            values[:, None, :] * load_matrix(weight, i, j, ROWS, COLUMNS)[None, :, :], 2
        )
    return total + tl.load(bias + i, mask=i < ROWS, other=0.0).to(tl.float32)[None, :]


@triton.jit
def linear_grad(
    grad, weight, n, j, N, ROWS, COLUMNS, BN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr
):
    """Return columns j of grad @ weight, the gradient of the input of `linear`, for samples n."""
    total = tl.zeros((BN, BJ), tl.float32)
    for begin in range(0, ROWS, BI):
        i = begin + tl.arange(0, BI)
        values = load_matrix(grad, n, i, N, ROWS)
        total += tl.sum(
            values[:, :, None] * load_matrix(weight, i, j, ROWS, COLUMNS)[None, :, :], 1
        )
    return total


@kernel
def excite(
    partial, stats, bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, squeezed, hidden, gate,
    N, C, R, P, splits, chunk,
    LINEAR: tl.constexpr, BN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Write squeezed (N, C), hidden (N, R) and gate (N, C) = sigmoid(fc2 relu(fc1 squeezed)).

    `squeezed` is the mean over the P pixels of each map; partial (N * splits, C) holds sums over
    chunks of these pixels. With LINEAR, partial (N * splits, 2, C) is instead the result of
    `kernels.moments`. This kernel then applies the batch norm to the mean of each map.
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
    for begin in range(0, R, BI):
        r = begin + tl.arange(0, BI)
        value = linear(squeezed, fc1_weight, fc1_bias, n, r, N, R, C, BN, BI, BJ)
        store_matrix(hidden, tl.where(value <= 0, 0.0, value), n, r, N, R)  # NaN stays
    tl.debug_barrier()
    for begin in range(0, C, BI):
        c = begin + tl.arange(0, BI)
        value = linear(hidden, fc2_weight, fc2_bias, n, c, N, C, R, BN, BI, BJ)
        store_matrix(gate, tl.sigmoid(value), n, c, N, C)


@kernel
def excite_grads(
    partial, stats, bias, gate, hidden, fc1_weight, fc2_weight, grad_logit, grad_hidden,
    squeeze_grad, N, C, R, splits, count, BN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Write grad_logit (N, C), grad_hidden (N, R) and squeeze_grad (N, C).

    grad_logit and grad_hidden are the gradients of the inputs of the sigmoid and of the ReLU.
    squeeze_grad is the gradient of `squeezed`, divided by `count`, the number of pixels of a map.
    partial holds s1 = sum m g and s2 = sum m g (x - mean), from `backward_kernels.grad_sums`.
    The gate's gradient is bias * s1 + scale * s2, because act(z) = m * ((x - mean) * scale + bias).
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
        value = linear_grad(grad_logit, fc2_weight, n, r, N, C, R, BN, BI, BJ)
        value = tl.where(load_matrix(hidden, n, r, N, R) <= 0, 0.0, value)
        store_matrix(grad_hidden, value, n, r, N, R)
    tl.debug_barrier()
    for begin in range(0, C, BJ):
        c = begin + tl.arange(0, BJ)
        value = linear_grad(grad_hidden, fc1_weight, n, c, N, R, C, BN, BI, BJ)
        store_matrix(squeeze_grad, value / count, n, c, N, C)


@triton.jit
def weight_grad(grad, x, weight, bias, N, ROWS, COLUMNS, BN: tl.constexpr, BW: tl.constexpr):
    """Write a tile of grad^T @ x to weight (ROWS, COLUMNS), and column sums of grad to bias."""
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
    squeezed, hidden, grad_logit, grad_hidden, fc1_weight, fc1_bias, fc2_weight, fc2_bias, N, C, R,
    BN: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Write the gradients of one layer's weight and bias: fc1 if program_id(1) is 0, else fc2."""
    if tl.program_id(1) == 0:
        weight_grad(grad_hidden, squeezed, fc1_weight, fc1_bias, N, R, C, BN, BW)
    else:
        weight_grad(grad_logit, hidden, fc2_weight, fc2_bias, N, C, R, BN, BW)
