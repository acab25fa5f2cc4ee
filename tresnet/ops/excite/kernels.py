"""Triton kernels of squeeze and excitation between two passes over the maps: small matrices.

N samples, C channels, R hidden units. A program takes BN samples, or a tile of the weights, and
goes through the rest in tiles of BC and BR, so that one kernel serves all widths. Everything is
float32.
"""

import triton
import triton.language as tl

from tresnet.ops.tiles.kernels import kernel, load_norm


@triton.jit
def load_matrix(x, rows, columns, ROWS, COLUMNS):
    """A tile of a dense matrix in float32, zero beyond its ends."""
    mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    return tl.load(x + rows[:, None] * COLUMNS + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_matrix(x, value, rows, columns, ROWS, COLUMNS):
    """Write a tile of a dense matrix, as far as it lies inside."""
    mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    tl.store(x + rows[:, None] * COLUMNS + columns, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def matrix_product(total, a, b):
    """`total + a b` on tensor cores, float32 split into three products of TF32."""
    return tl.dot(a, b, acc=total, input_precision="tf32x3")


@kernel
def excite(
    partial, stats, bias, fc1, fc1_bias, fc2, fc2_bias, squeezed, hidden, gate, N, C, R, P, splits,
    chunk, LINEAR: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """The gate of some samples: sigmoid(fc2 relu(fc1 squeezed)), with both biases.

    partial (N * splits, C) holds the sums of the squeezed maps over chunks of their P pixels; with
    LINEAR (N * splits, 2, C), of `moments`, the means of x, from which those of z follow. fc1 (R,
    C), fc2 (C, R); written are squeezed and gate (N, C) and hidden (N, R).
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    kinds: tl.constexpr = 2 if LINEAR else 1
    for begin in range(0, C, BC):
        c = begin + tl.arange(0, BC)
        mask = (n < N)[:, None] & (c < C)[None, :]
        total = tl.zeros((BN, BC), tl.float32)
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
    tl.debug_barrier()  # this program's threads read what others of them have written
    for row in range(0, R, BR):
        r = row + tl.arange(0, BR)
        total = tl.zeros((BN, BR), tl.float32)
        for begin in range(0, C, BC):
            c = begin + tl.arange(0, BC)
            value = load_matrix(squeezed, n, c, N, C)
            total = matrix_product(total, value, tl.trans(load_matrix(fc1, r, c, R, C)))
        total += tl.load(fc1_bias + r, mask=r < R, other=0.0).to(tl.float32)[None, :]
        store_matrix(hidden, tl.where(total <= 0, 0.0, total), n, r, N, R)  # NaN stays
    tl.debug_barrier()
    for begin in range(0, C, BC):
        c = begin + tl.arange(0, BC)
        total = tl.zeros((BN, BC), tl.float32)
        for row in range(0, R, BR):
            r = row + tl.arange(0, BR)
            weight = load_matrix(fc2, c, r, C, R)
            total = matrix_product(total, load_matrix(hidden, n, r, N, R), tl.trans(weight))
        total += tl.load(fc2_bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        store_matrix(gate, tl.sigmoid(total), n, c, N, C)


@kernel
def excite_grads(
    partial, stats, bias, gate, hidden, fc1, fc2, grad_logit, grad_hidden, spread, N, C, R, splits,
    count, BN: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Gradients of the two layers' outputs, and spread: of the squeeze over the count of pixels.

    The gate's gradient is the sum of g * act(z), and act(z) = m * ((x - mean) * scale + bias): the
    sums of `grad_sums` in partial give it without another pass.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    for begin in range(0, C, BC):
        c = begin + tl.arange(0, BC)
        mask = (n < N)[:, None] & (c < C)[None, :]
        s1 = tl.zeros((BN, BC), tl.float32)
        s2 = tl.zeros((BN, BC), tl.float32)
        for s in range(0, splits):
            at = partial + (n * splits + s)[:, None] * 4 * C + c[None, :]
            s1 += tl.load(at, mask=mask, other=0.0)
            s2 += tl.load(at + C, mask=mask, other=0.0)
        k = tl.load(stats + C + c, mask=c < C, other=0.0)[None, :]
        beta = tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        g = load_matrix(gate, n, c, N, C)
        store_matrix(grad_logit, (s1 * beta + s2 * k) * (1.0 - g) * g, n, c, N, C)
    tl.debug_barrier()
    for row in range(0, R, BR):
        r = row + tl.arange(0, BR)
        total = tl.zeros((BN, BR), tl.float32)
        for begin in range(0, C, BC):
            c = begin + tl.arange(0, BC)
            grad = load_matrix(grad_logit, n, c, N, C)
            total = matrix_product(total, grad, load_matrix(fc2, c, r, C, R))
        total = tl.where(load_matrix(hidden, n, r, N, R) <= 0, 0.0, total)
        store_matrix(grad_hidden, total, n, r, N, R)
    tl.debug_barrier()
    for begin in range(0, C, BC):
        c = begin + tl.arange(0, BC)
        total = tl.zeros((BN, BC), tl.float32)
        for row in range(0, R, BR):
            r = row + tl.arange(0, BR)
            grad = load_matrix(grad_hidden, n, r, N, R)
            total = matrix_product(total, grad, load_matrix(fc1, r, c, R, C))
        store_matrix(spread, total / count, n, c, N, C)


@kernel
def excite_weight_grads(
    squeezed, hidden, grad_logit, grad_hidden, fc1, fc1_bias, fc2, fc2_bias, N, C, R,
    BN: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Gradients of the two layers' weights and biases, written to fc1, fc1_bias and so on."""
    columns = tl.cdiv(C, BC)
    c = (tl.program_id(0) % columns) * BC + tl.arange(0, BC)
    r = (tl.program_id(0) // columns) * BR + tl.arange(0, BR)
    first = tl.zeros((BR, BC), tl.float32)
    second = tl.zeros((BC, BR), tl.float32)
    first_bias = tl.zeros((BR,), tl.float32)
    second_bias = tl.zeros((BC,), tl.float32)
    for begin in range(0, N, BN):
        n = begin + tl.arange(0, BN)
        inner, outer = load_matrix(grad_hidden, n, r, N, R), load_matrix(grad_logit, n, c, N, C)
        first = matrix_product(first, tl.trans(inner), load_matrix(squeezed, n, c, N, C))
        second = matrix_product(second, tl.trans(outer), load_matrix(hidden, n, r, N, R))
        first_bias += tl.sum(inner, 0)
        second_bias += tl.sum(outer, 0)
    store_matrix(fc1, first, r, c, R, C)
    store_matrix(fc2, second, c, r, C, R)
    if tl.program_id(0) < columns:
        tl.store(fc2_bias + c, second_bias.to(fc2_bias.dtype.element_ty), mask=c < C)
    if tl.program_id(0) % columns == 0:
        tl.store(fc1_bias + r, first_bias.to(fc1_bias.dtype.element_ty), mask=r < R)
