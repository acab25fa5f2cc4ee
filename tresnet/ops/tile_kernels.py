"""Triton functions that the kernels of feature maps share.

A map is a tensor (N, P, C): N samples, P pixels, C channels. A Triton program covers a chunk of
pixels of one sample and BC channels, and loops over tiles [BP, BC] of its chunk. A kernel that
treats all samples alike gets a batch as one sample of N * P pixels. A thread can load AC channels
at once, because AC divides C. Everything is computed in float32.
"""

import triton
import triton.language as tl

# A reduction has three pipeline stages: it sums one tile while it loads the next two tiles.
STAGES = tl.constexpr(3)
# A kernel is compiled once for all sizes. By default, Triton would compile another version for
# multiples of 16; AC states divisibility instead.
SIZES = "N", "P", "C", "R", "G", "H", "W", "HO", "WO", "splits", "chunk", "count", "merged"
kernel = triton.jit(do_not_specialize=SIZES)


@triton.jit
def aligned(value, BY: tl.constexpr):
    """Return `value`, marked as a multiple of BY, so that Triton can load BY values at once."""
    return value // BY * BY


@triton.jit
def chunk_of_program(P, C, splits, chunk, BC: tl.constexpr, FROM_END: tl.constexpr = False):
    """Return a program's group, sample, first pixel, number of pixels, channels and their mask.

    The group is the index of the program's chunk in the batch. The channels c and their mask are
    [BC]; the other results are numbers, the sample in 64 bits. Kernels that write maps set
    FROM_END: their first programs cover the end of the map, because the L2 cache still holds this
    end from the kernel before.
    """
    columns = tl.cdiv(C, BC)
    group = tl.program_id(0) // columns
    if FROM_END:
        group = tl.num_programs(0) // columns - 1 - group
    start = (group % splits) * chunk
    c = (tl.program_id(0) % columns) * BC + tl.arange(0, BC)
    c_mask = c < C
    return group, (group // splits).to(tl.int64), start, tl.minimum(chunk, P - start), c, c_mask


@triton.jit
def load_once(pointers, mask):
    """Load values as float32 for a single use: the L2 cache may evict these values first."""
    value = tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")  # [BP, BC]
    return value.to(tl.float32)


@triton.jit
def bytes_of_tile(n, p, inside, P, C, BC: tl.constexpr):
    """Return offsets and mask [BP, BC / 8] of the bytes that hold one bit for each value of a tile.

    A byte of the mask (N, P, ceil(C / 8)) holds eight channels. `inside` [BP] is true for the
    pixels p [BP] of the tile that lie in the program's chunk.
    """
    byte = tl.program_id(0) % tl.cdiv(C, BC) * BC // 8 + tl.arange(0, (BC + 7) // 8)
    offsets = (n * P + p)[:, None] * ((C + 7) // 8) + byte
    return offsets, inside[:, None] & (byte * 8 < C)[None, :]


@triton.jit
def packed(flags):
    """Pack a tile [BP, BC] of booleans into bytes; a byte's lowest bit is its first channel."""
    W: tl.constexpr = min(flags.shape[1], 8)
    bits = tl.reshape(flags.to(tl.int32), (flags.shape[0], flags.shape[1] // W, W))
    return tl.sum(bits << tl.arange(0, W)[None, None, :], 2).to(tl.uint8)


@triton.jit
def unpacked(bits, BP: tl.constexpr, BC: tl.constexpr):
    """Convert bytes, as returned by `packed`, to a tile [BP, BC] of booleans."""
    W: tl.constexpr = min(BC, 8)
    flags = (bits.to(tl.int32)[:, :, None] >> tl.arange(0, W)[None, None, :]) & 1
    return tl.reshape(flags, (BP, BC)) != 0


@triton.jit
def load_norm(stats, bias, C, c, c_mask):
    """Return mean, scale and bias [1, BC] at channels c; without stats, mean is 0 and scale 1."""
    beta = tl.load(bias + c, mask=c_mask, other=0.0).to(tl.float32)  # [BC]
    mu = tl.zeros_like(beta)
    k = mu + 1.0
    if stats is not None:
        mu = tl.load(stats + c, mask=c_mask, other=0.0)  # [BC]
        k = tl.load(stats + C + c, mask=c_mask, other=0.0)  # [BC]
    return mu[None, :], k[None, :], beta[None, :]


@triton.jit
def activate(z, slope):
    """Return the leaky ReLU of z, or z itself if slope is None."""
    if slope is not None:
        z = tl.where(z > 0, z, z * slope)
    return z


@triton.jit
def activation_slope(z, slope):
    """Return the derivative m of the leaky ReLU at z, for which act(z) = m * z."""
    m = tl.full(z.shape, 1.0, tl.float32)
    if slope is not None:
        m = tl.where(z > 0, m, slope)
    return m
