"""Triton kernels of the two linear layers of squeeze and excitation (arXiv 1709.01507).

There are N samples, C channels and R hidden units. A program of `excite` or `excite_grads` covers
BN = 16 samples, the least that a product by tensor cores takes. It has three steps. The first adds
up the sums of all chunks of a map. The second loops over tiles of BC channels, and adds up the
hidden units, which both layers share; they stay in registers. The third loops over the same tiles,
and writes one result for each channel. Tensor cores multiply float32 as three products of
TF32, so everything is computed in float32. A compiled kernel serves all N, and all C and R that
have the same BX, BC, BR, AC and AR.
"""

import triton
import triton.language as tl

from tresnet.ops.epilogue.statistics_kernels import merge_grad_sums_of
from tresnet.ops.tile_kernels import STAGES, activate, aligned, kernel, load_norm, load_once


@triton.jit
def load_matrix(x, rows, columns, ROWS, COLUMNS, TRANSPOSED: tl.constexpr = False):
    """Load a tile of a matrix as float32, with zeros outside the matrix.

    x is dense, and has the shape (ROWS, COLUMNS) or, if TRANSPOSED, (COLUMNS, ROWS).
    """
    mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    if TRANSPOSED:
        at = x + rows[:, None] + columns[None, :] * ROWS
    else:
        at = x + rows[:, None] * COLUMNS + columns
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)  # [rows, columns]


@triton.jit
def store_matrix(x, value, rows, columns, ROWS, COLUMNS):
    """Store the part of a tile that lies inside a dense matrix."""
    mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    tl.store(x + rows[:, None] * COLUMNS + columns, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def chunk_mask(n, c, N, C, exists):
    """Return the mask of samples n and channels c of a chunk; all False unless it `exists`."""
    return (n < tl.where(exists, N, 0))[:, None] & (c < C)[None, :]


@triton.jit
def product(x, y, total):
    """Return total + x @ y, each value of x and y split into two TF32 numbers."""
    return tl.dot(x, y, total, input_precision="tf32x3")


@triton.jit
def hidden_units(x, weights, n, r, N, C, R, BC: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Return x @ weights for samples n of x (N, C) and hidden units r of weights (C, R)."""
    total = tl.zeros((n.shape[0], r.shape[0]), tl.float32)
    for begin in tl.range(0, C, BC, num_stages=STAGES):
        c = begin + tl.arange(0, BC)
        tile = load_matrix(x, n, c, N, C)  # [BN, BC]
        total = product(tile, load_matrix(weights, c, r, C, R, TRANSPOSED), total)  # [BC, BR]
    return total


@kernel
def excite(
    partial, stats, bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, squeezed, hidden, gate,
    N, C, R, P, splits, chunk,
    LINEAR: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, BX: tl.constexpr, BC: tl.constexpr,
    BR: tl.constexpr, NB: tl.constexpr, AC: tl.constexpr, AR: tl.constexpr,
):  # fmt: skip
    """Write squeezed (N, C), hidden (N, R) and gate (N, C) = sigmoid(fc2 relu(fc1 squeezed)).

    `squeezed` is the mean over the P pixels of each map; partial (N * splits, C) holds sums over
    chunks of these pixels. With LINEAR, partial (N * splits, 2, C) is instead the result of
    `moments`. This kernel then applies the batch norm to the mean of each map.
    """
    C, R = aligned(C, AC), aligned(R, AR)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    kinds: tl.constexpr = 2 if LINEAR else 1
    for begin in range(0, C, BX):
        c = begin + tl.arange(0, BX)
        total = tl.zeros((BN, BX), tl.float32)
        for first in range(0, splits, BS):
            for s in tl.static_range(BS):
                at = partial + (n * splits + first + s)[:, None] * kinds * C + c
                mask = chunk_mask(n, c, N, C, first + s < splits)
                value = tl.load(at, mask=mask, other=0.0)  # [BN, BX]
                if LINEAR:
                    value *= tl.minimum(chunk, P - (first + s) * chunk).to(tl.float32)
                total += value
        mean = total / P
        if LINEAR:
            mu, k, beta = load_norm(stats, bias, C, c, c < C)
            mean = (mean - mu) * k + beta
        store_matrix(squeezed, mean, n, c, N, C)
    tl.debug_barrier()  # threads read values that other threads of this program have written
    for block in tl.static_range(NB):
        r = block * BR + tl.arange(0, BR)
        total = hidden_units(squeezed, fc1_weight, n, r, N, C, R, BC, True)
        h = total + tl.load(fc1_bias + r, mask=r < R, other=0.0).to(tl.float32)[None, :]  # [1, BR]
        # NaN stays in a hidden unit, but a column of zeros would turn infinity into NaN
        h = tl.where((h <= 0) | (r >= R)[None, :], 0.0, h)
        store_matrix(hidden, h, n, r, N, R)
        if block > 0:
            tl.debug_barrier()
        for begin in tl.range(0, C, BC, num_stages=STAGES):
            c = begin + tl.arange(0, BC)
            if block > 0:
                logit = load_matrix(gate, n, c, N, C)  # [BN, BC]
            else:
                bias_row = tl.load(fc2_bias + c, mask=c < C, other=0.0).to(tl.float32)  # [BC]
                logit = bias_row[None, :]
            weights = load_matrix(fc2_weight, r, c, R, C, True)  # [BR, BC]
            logit += product(h, weights, tl.zeros((BN, BC), tl.float32))
            last: tl.constexpr = block == NB - 1
            store_matrix(gate, tl.sigmoid(logit) if last else logit, n, c, N, C)


@kernel
def excite_map(
    x, stats, bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, squeezed, hidden, gate, out,
    P, C, R, slope,
    BP: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, AC: tl.constexpr, AR: tl.constexpr,
):  # fmt: skip
    """Write what `excite` does, and out = gate * act(z): a program covers a sample of a small map.

    It reads the sample twice, the second time mostly from a cache. Tiles of BR hidden units and all
    channels go through both layers at once.
    """
    C, R = aligned(C, AC), aligned(R, AR)
    n = tl.program_id(0).to(tl.int64)
    c, rows = tl.arange(0, BC), tl.arange(0, BP)
    c_mask = c < C
    mu, k, beta = load_norm(stats, bias, C, c, c_mask)
    x += n * P * C
    out += n * P * C
    total = tl.zeros((BP, BC), tl.float32)
    for begin in tl.range(0, P, BP, num_stages=5):  # one program has few loads under way
        p = begin + rows
        inside = (p < P)[:, None] & c_mask[None, :]
        value = tl.load(x + p[:, None] * C + c, mask=inside, other=0.0)  # [BP, BC]
        a = activate((value.to(tl.float32) - mu) * k + beta, slope)
        total += tl.where(inside, a, 0.0)  # outside the map, a is not 0
    mean = tl.sum(total, 0) / P
    tl.store(squeezed + n * C + c, mean, mask=c_mask)
    logit = tl.load(fc2_bias + c, mask=c_mask, other=0.0).to(tl.float32)  # [BC]
    for begin in range(0, R, BR):
        r = begin + tl.arange(0, BR)
        # as in `moments`, + 0.0 ends each product
        h = tl.sum(load_matrix(fc1_weight, r, c, R, C) * mean[None, :] + 0.0, 1)  # [BR, BC]
        h += tl.load(fc1_bias + r, mask=r < R, other=0.0).to(tl.float32)  # [BR]
        h = tl.where((h <= 0) | (r >= R), 0.0, h)  # as in `excite`
        tl.store(hidden + n * R + r, h, mask=r < R)
        weights = load_matrix(fc2_weight, r, c, R, C, True)  # [BR, BC]
        logit += tl.sum(weights * h[:, None] + 0.0, 0)
    factor = tl.sigmoid(logit)
    tl.store(gate + n * C + c, factor, mask=c_mask)
    for begin in range(0, P, BP):
        p = begin + rows
        inside = (p < P)[:, None] & c_mask[None, :]
        value = load_once(x + p[:, None] * C + c, inside)  # [BP, BC]
        y = activate((value - mu) * k + beta, slope) * factor[None, :]
        tl.store(out + p[:, None] * C + c, y.to(out.dtype.element_ty), mask=inside)


@kernel
def excite_grads(
    partial, drop_path_scale, stats, bias, gate, hidden, fc1_weight, fc2_weight, grad_logit,
    grad_hidden, squeeze_grad, N, C, R, splits, count,
    BN: tl.constexpr, BS: tl.constexpr, BX: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
    NB: tl.constexpr, AC: tl.constexpr, AR: tl.constexpr,
):  # fmt: skip
    """Write grad_logit (N, C), grad_hidden (N, R) and squeeze_grad (N, C).

    grad_logit and grad_hidden are the gradients of the inputs of the sigmoid and of the ReLU.
    squeeze_grad is the gradient of `squeezed`, divided by `count`, the number of pixels of a map.
    partial holds s1 = sum m g and s2 = sum m g (x - mean), from `grad_sums`.
    The gate's gradient is bias * s1 + scale * s2, because act(z) = m * ((x - mean) * scale + bias).
    drop_path_scale (N,) multiplies the gate's gradient; None without stochastic depth.
    """
    C, R = aligned(C, AC), aligned(R, AR)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    for begin in range(0, C, BX):
        c = begin + tl.arange(0, BX)
        _, k, beta = load_norm(stats, bias, C, c, c < C)
        total = tl.zeros((BN, BX), tl.float32)
        for first in range(0, splits, BS):
            for s in tl.static_range(BS):
                at = partial + (n * splits + first + s)[:, None] * 4 * C + c  # of four sums
                mask = chunk_mask(n, c, N, C, first + s < splits)
                s1 = tl.load(at, mask=mask, other=0.0)  # [BN, BX]
                s2 = tl.load(at + C, mask=mask, other=0.0)  # [BN, BX]
                total += s1 * beta + s2 * k
        if drop_path_scale is not None:
            total *= tl.load(drop_path_scale + n, mask=n < N, other=0.0)[:, None]  # [BN, 1]
        g = load_matrix(gate, n, c, N, C)  # [BN, BX]
        store_matrix(grad_logit, total * (1.0 - g) * g, n, c, N, C)
    tl.debug_barrier()  # threads read values that other threads of this program have written
    for block in tl.static_range(NB):
        r = block * BR + tl.arange(0, BR)
        total = hidden_units(grad_logit, fc2_weight, n, r, N, C, R, BC, False)
        h = tl.where(load_matrix(hidden, n, r, N, R) <= 0, 0.0, total)  # [BN, BR]
        store_matrix(grad_hidden, h, n, r, N, R)
        h = h / count
        if block > 0:
            tl.debug_barrier()
        for begin in tl.range(0, C, BC, num_stages=STAGES):
            c = begin + tl.arange(0, BC)
            weights = load_matrix(fc1_weight, r, c, R, C)  # [BR, BC]
            grad = product(h, weights, tl.zeros((BN, BC), tl.float32))
            if block > 0:
                grad += load_matrix(squeeze_grad, n, c, N, C)  # [BN, BC]
            store_matrix(squeeze_grad, grad, n, c, N, C)


@triton.jit
def weight_grad(grad, x, weight, bias, N, ROWS, COLUMNS, BN: tl.constexpr, BW: tl.constexpr):
    """Write a tile of grad^T @ x to weight (ROWS, COLUMNS), and column sums of grad to bias."""
    columns = tl.cdiv(COLUMNS, BW)
    i = (tl.program_id(0) // columns) * BW + tl.arange(0, BW)
    j = (tl.program_id(0) % columns) * BW + tl.arange(0, BW)
    total = tl.zeros((BW, BW), tl.float32)
    sums = tl.zeros((BW, BN), tl.float32)
    # the layers differ in their number of tiles: a program without one has nothing to add up
    end = tl.where(tl.program_id(0) // columns * BW < ROWS, N, 0)
    for begin in tl.range(0, end, BN, num_stages=STAGES):
        n = begin + tl.arange(0, BN)
        outer = load_matrix(grad, i, n, ROWS, N, True)  # [BW, BN]
        total = product(outer, load_matrix(x, n, j, N, COLUMNS), total)  # [BN, BW]
        sums += outer
    store_matrix(weight, total, i, j, ROWS, COLUMNS)
    if tl.program_id(0) % columns == 0:
        tl.store(bias + i, tl.sum(sums, 1).to(bias.dtype.element_ty), mask=i < ROWS)


@kernel
def excite_weight_grads(
    squeezed, hidden, grad_logit, grad_hidden, partial, gate, squeeze_grad, stats, fc1_weight,
    fc1_bias, fc2_weight, fc2_bias, norm_grads, N, C, R, G, splits, count,
    BN: tl.constexpr, BW: tl.constexpr, AC: tl.constexpr, AR: tl.constexpr, BG: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Write the gradients of all weights behind `excite_grads`, by three kinds of programs.

    If program_id(1) is 0 or 1, a program writes gradients of one layer's weight and bias: fc1 or
    fc2. If it is 2, a program merges the sums of the batch norm for BC channels, because this
    depends on `excite_grads` too. A launch of its own would take longer than the work.
    """
    if tl.program_id(1) == 2:
        c = tl.program_id(0) * BC + tl.arange(0, BC)
        merge_grad_sums_of(
            c, partial, gate, squeeze_grad, stats, norm_grads, G, C, splits, count, BG, BC
        )
    elif tl.program_id(1) == 0:
        C, R = aligned(C, AC), aligned(R, AR)
        weight_grad(grad_hidden, squeezed, fc1_weight, fc1_bias, N, R, C, BN, BW)
    else:
        C, R = aligned(C, AC), aligned(R, AR)
        weight_grad(grad_logit, hidden, fc2_weight, fc2_bias, N, C, R, BN, BW)
