"""Triton functions that several kernels call: chunks of pixels, masks of bits, and the blur.

The blur maps a row of `size` pixels to `size_out` outputs. Output i is the mean, weighted by
1, 2, 1, of the pixels 2 i - 1, 2 i and 2 i + 1. Pixels are reflected at the border. The
transposed blur computes squares of 2 x 2 pixels (see `square_of`).
"""

import triton
import triton.language as tl

# A kernel is compiled once for all sizes. By default, Triton would compile another version for
# multiples of 16; AC states divisibility instead.
kernel = triton.jit(
    do_not_specialize=(
        *("N", "P", "C", "R", "G", "H", "W", "HO", "WO", "splits", "chunk", "count"),
    ),
)


@triton.jit
def aligned(value, BY: tl.constexpr):
    """Return `value`, marked as a multiple of BY, so that Triton can load BY values at once."""
    return value // BY * BY


@triton.jit
def chunk_of_program(P, C, splits, chunk, BC: tl.constexpr, BACKWARDS: tl.constexpr = False):
    """Return a program's group, sample, first pixel, number of pixels, channels and channel mask.

    The group is the index of the program's chunk in the batch. Kernels that write maps set
    BACKWARDS: their first programs cover the end of the map, because the L2 cache still holds this
    end from the kernel before.
    """
    columns = tl.cdiv(C, BC)
    group = tl.program_id(0) // columns
    if BACKWARDS:
        group = tl.num_programs(0) // columns - 1 - group
    start = (group % splits) * chunk
    c = (tl.program_id(0) % columns) * BC + tl.arange(0, BC)
    c_mask = c < C
    return group, (group // splits).to(tl.int64), start, tl.minimum(chunk, P - start), c, c_mask


@triton.jit
def load_once(pointers, mask):
    """Load values as float32 for a single use: the L2 cache may evict these values first."""
    return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)


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
    """Return mean, scale and bias (1, BC) at channels c; without stats, mean is 0 and scale 1."""
    beta = tl.load(bias + c, mask=c_mask, other=0.0).to(tl.float32)
    mu = tl.zeros_like(beta)
    k = mu + 1.0
    if stats is not None:
        mu = tl.load(stats + c, mask=c_mask, other=0.0)
        k = tl.load(stats + C + c, mask=c_mask, other=0.0)
    return mu[None, :], k[None, :], beta[None, :]


@triton.jit
def reflect(i, size):
    """Return index i of a row, reflected at the row's border without repeating the edge pixel."""
    i = tl.where(i < 0, -i, i)
    return tl.where(i >= size, 2 * size - 2 - i, i)


@triton.jit
def odd_pixel_weights(i, size, size_out):
    """Return the blur's weights of pixel 2 i + 1 in outputs i and i + 1, or 0 outside the row.

    A weight is 1/4, or 1/2 in an outermost output that also reads the pixel's reflection. Pixel 2 i
    has the weight 1/2 in output i, and 0 in other outputs.
    """
    near = tl.where(2 * i + 1 < size, tl.where(i == 0, 0.5, 0.25), 0.0)
    far = tl.where(i + 1 < size_out, tl.where(2 * i + 3 == size, 0.5, 0.25), 0.0)
    return near, far


@triton.jit
def square_of(p, H, W, HO, WO):
    """Return row i and column j of the blur's output p, with the `odd_pixel_weights` of i and j.

    The square of output p has the input pixels (2 i, 2 j) to (2 i + 1, 2 j + 1). Only the output p
    and its right, lower and lower right neighbours depend on these four pixels. So the transposed
    blur computes the gradients of four pixels from the gradients of four outputs.
    """
    u0, u1 = odd_pixel_weights(p // WO, H, HO)
    v0, v1 = odd_pixel_weights(p % WO, W, WO)
    return p // WO, p % WO, u0, u1, v0, v1


@triton.jit
def pixel_of_square(i, j, mask, H, W, DI: tl.constexpr, DJ: tl.constexpr):
    """Return the index of pixel (2 i + DI, 2 j + DJ), and a mask of the pixels inside the map."""
    h, w = 2 * i + DI, 2 * j + DJ
    return h * W + w, mask & ((h < H) & (w < W))[:, None]


@triton.jit
def load_square_gradients(grad, p, c, mask, u1, v1, WO, C):
    """Load the gradients of the four outputs of a blur that depend on one square of 2 x 2 inputs.

    The gradient of an output outside the map is 0. Each result is [BP, BC].
    """
    grad += p[:, None] * C + c
    right, lower = mask & (v1 > 0)[:, None], mask & (u1 > 0)[:, None]
    t00 = tl.load(grad, mask=mask, other=0.0).to(tl.float32)
    t01 = tl.load(grad + C, mask=right, other=0.0).to(tl.float32)
    t10 = tl.load(grad + WO * C, mask=lower, other=0.0).to(tl.float32)
    t11 = tl.load(grad + (WO + 1) * C, mask=lower & right, other=0.0).to(tl.float32)
    return t00, t01, t10, t11


@triton.jit
def transposed_row(near, far, u0, u1, ODD: tl.constexpr):
    """Return the gradient of pixel 2 i of a row, or of pixel 2 i + 1 if ODD is 1.

    near and far are the gradients of outputs i and i + 1; u0 and u1 are the odd pixel's weights.
    """
    if ODD:
        return u0[:, None] * near + u1[:, None] * far
    return 0.5 * near


@triton.jit
def transposed_blur_at(t00, t01, t10, t11, u0, u1, v0, v1, DI: tl.constexpr, DJ: tl.constexpr):
    """Return the gradient of pixel (DI, DJ) of a 2 x 2 square, from four output gradients."""
    upper = transposed_row(t00, t01, v0, v1, DJ)
    lower = transposed_row(t10, t11, v0, v1, DJ)
    return transposed_row(upper, lower, u0, u1, DI)


@triton.jit
def weights_of_pixel(u0, u1, v0, v1, DI: tl.constexpr, DJ: tl.constexpr):
    """Return the sum of the weights that a pixel has in all outputs of the blur.

    The sum is what the transposed blur of a map of ones gives for that pixel.
    """
    rows = (u0 + u1)[:, None] if DI else 0.5
    columns = (v0 + v1)[:, None] if DJ else 0.5
    return rows * columns
