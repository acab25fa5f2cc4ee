"""Launches of squeeze and excitation between two passes over the maps."""

import functools
from typing import Any

import torch
from torch import Tensor

from tresnet.ops.abn.launch import RESIDENT
from tresnet.ops.operators import launch, operator
from tresnet.ops.tiles import by_form, geometry, halved, plan

# Samples of a program, and rows and columns of the weights that it reads at once. Batch 256 has 64
# programs, each on its own multiprocessor. In stage 3 of tresnet_m each reads 256 KiB of weights
# from the second-level cache in 18 rounds: 16 MiB in all, or 3 microseconds. Tensor cores need 16
# samples: 16 programs of 72 rounds. cuBLAS moves as many bytes with ten more launches.
TILE = 4, 32, 128
WEIGHTS_TILE = 64, 16  # samples at once; side of the square tiles of the weights' gradients
WARPS = 16


@functools.cache
def _kernels() -> Any:
    from tresnet.ops.excite import kernels

    return kernels


def _written(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dense = torch.contiguous_format
    return (
        torch.empty_like(a, memory_format=dense), torch.empty_like(b, memory_format=dense),
        torch.empty_like(c, memory_format=dense), torch.empty_like(d, memory_format=dense),
    )  # fmt: skip


@by_form
def _pixels_and_chunk(x: Tensor, processors: int, blur: bool) -> tuple[int, int]:
    """Return the squeezed pixels of a sample, and the pixels of a chunk of `moments`."""
    shape = halved(x) if blur else geometry(x, as_one_sample=False)
    return shape.p, plan(shape, processors * RESIDENT).chunk


@operator(
    lambda partial, x, stats, bias, linear, blur, fc1, *_: (
        partial.new_empty(x.shape[:2]),
        partial.new_empty(len(x), len(fc1)),
        partial.new_empty(x.shape[:2]),
    )
)
def forward(
    partial: Tensor,
    x: Tensor,
    stats: Tensor | None,
    bias: Tensor,
    linear: bool,
    blur: bool,
    fc1: Tensor,
    fc1_bias: Tensor,
    fc2: Tensor,
    fc2_bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the squeezed maps (N, C), the hidden layer (N, R) and the gate (N, C), all float32.

    `partial` is the result of `tresnet.ops.abn.launch.squeeze`. If the maps are a `linear` function
    of `x` (N, C, ...), it is the second result of `statistics`, whose first is `stats` (4, C).
    `fc1` is (R, C), and `fc2` (C, R).
    """
    (samples, channels), reduced = x.shape[:2], fc1.shape[0]
    squeezed, gate = partial.new_empty(samples, channels), partial.new_empty(samples, channels)
    hidden = partial.new_empty(samples, reduced)
    pixels, chunk = _pixels_and_chunk(x, blur)
    launch(
        _kernels().excite, (-(-samples // TILE[0]), 1, 1), WARPS,
        (
            partial, partial if stats is None else stats, bias.contiguous(), fc1.contiguous(),
            fc1_bias.contiguous(), fc2.contiguous(), fc2_bias.contiguous(), squeezed, hidden, gate,
        ),
        (samples, channels, reduced, pixels, partial.shape[0] // samples, chunk, linear, *TILE),
    )  # fmt: skip
    return squeezed, hidden, gate


@operator(
    lambda partial, stats, bias, gate, squeezed, hidden, fc1, fc1_bias, fc2, fc2_bias, pixels: (
        torch.empty_like(gate), *_written(fc1, fc1_bias, fc2, fc2_bias),
    )
)  # fmt: skip
def backward(
    partial: Tensor,
    stats: Tensor,
    bias: Tensor,
    gate: Tensor,
    squeezed: Tensor,
    hidden: Tensor,
    fc1: Tensor,
    fc1_bias: Tensor,
    fc2: Tensor,
    fc2_bias: Tensor,
    pixels: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradient of the squeeze divided by `pixels` (N, C), and those of the parameters.

    `partial` is the result of `tresnet.ops.abn.launch.grad_sums`; squeezed, hidden and gate are
    those of `forward`. The latter four have the dtypes of their parameters.
    """
    (samples, channels), reduced = gate.shape, fc1.shape[0]
    grad_logit, grad_hidden = torch.empty_like(gate), torch.empty_like(hidden)
    squeeze_grad = torch.empty_like(gate)
    grads = _written(fc1, fc1_bias, fc2, fc2_bias)
    sizes = samples, channels, reduced
    launch(
        _kernels().excite_grads, (-(-samples // TILE[0]), 1, 1), WARPS,
        (
            partial, stats, bias.contiguous(), gate, hidden, fc1.contiguous(), fc2.contiguous(),
            grad_logit, grad_hidden, squeeze_grad,
        ),
        (*sizes, partial.shape[0] // samples, float(pixels), *TILE),
    )  # fmt: skip
    squares = -(-channels // WEIGHTS_TILE[1]) * -(-reduced // WEIGHTS_TILE[1])
    launch(
        _kernels().excite_weight_grads, (squares, 2, 1), 4,
        (squeezed, hidden, grad_logit, grad_hidden, *grads), (*sizes, *WEIGHTS_TILE),
    )  # fmt: skip
    return squeeze_grad, *grads
