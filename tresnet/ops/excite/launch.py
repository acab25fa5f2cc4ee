"""Launches of the kernels of squeeze and excitation; `reference` defines each public function."""

import torch
from torch import Tensor

from tresnet.ops.abn.launch import RESIDENT
from tresnet.ops.abn.types import Kept, Norm, SEWeights
from tresnet.ops.launching import Form, launch
from tresnet.ops.tiles import by_form, geometry, halved, plan

# A program covers 4 samples, and loads tiles of 32 x 128 weights. So a batch of 256 has 64
# programs, and each has a multiprocessor to itself. In stage 3 of tresnet_m, a program reads
# 256 KiB of weights in 18 iterations of its loops. The 64 programs read 16 MiB from the L2 cache,
# in 3 microseconds. With tensor cores, a program would need 16 samples, and 72 iterations. cuBLAS
# would move as many bytes, but would need ten more launches.
TILE = 4, 32, 128
WEIGHTS_TILE = 64, 16  # a program loads 64 samples at once, for gradients of 16 x 16 weights
WARPS = 16


def forward(
    partial: Tensor, kept: Kept, norm: Norm, *, linear: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the squeezed maps (N, C), the hidden layer (N, R) and the gate (N, C), all float32.

    `partial` is the result of `tresnet.ops.abn.launch.squeeze`. With `linear`, neither activation
    nor blur comes before the SE, and `partial` is the second result of `abn.launch.statistics`.
    """
    se, stats = _dense(norm), kept.stats
    samples, channels = kept.y.shape[:2]
    squeezed, gate = partial.new_empty(samples, channels), partial.new_empty(samples, channels)
    hidden = partial.new_empty(samples, len(se.fc1_weight))
    launch(
        _excite(
            kept.y, _dtypes(norm), len(se.fc1_weight), len(partial) // samples, norm.blur, linear,
            TILE,
        ),
        partial=partial, stats=partial if stats is None else stats, bias=norm.beta.contiguous(),
        **se._asdict(), squeezed=squeezed, hidden=hidden, gate=gate,
    )  # fmt: skip
    return squeezed, hidden, gate


def _dense(norm: Norm) -> SEWeights:
    assert norm.se is not None
    return SEWeights(*map(Tensor.contiguous, norm.se))


def _dtypes(norm: Norm) -> tuple[torch.dtype, ...]:
    return tuple(part.dtype for part in (norm.beta, *(norm.se or ())))


@by_form
def _excite(
    x: Tensor, processors: int, reduced: int, splits: int, blur: bool, linear: bool,
    tile: tuple[int, int, int],
) -> Form:  # fmt: skip
    (n, channels), (bn, bi, bj) = x.shape[:2], tile
    shape = halved(x) if blur else geometry(x, as_one_sample=False)
    return Form(
        "excite.excite", WARPS, (-(-n // bn),), N=n, C=channels, R=reduced, P=shape.p,
        splits=splits, chunk=plan(shape, processors * RESIDENT).chunk, LINEAR=linear,
        BN=bn, BI=bi, BJ=bj,
    )  # fmt: skip


def backward(partial: Tensor, kept: Kept, norm: Norm) -> tuple[Tensor, SEWeights]:
    """Return `Sums.squeeze_grad` (N, C), and the gradients of the SE's weights and biases.

    `partial` is the first result of `tresnet.ops.abn.launch.grad_sums`. Each weight's gradient has
    the weight's dtype.
    """
    gate = kept.gate if kept.excited is None else kept.excited
    hidden, squeezed, stats, se = kept.hidden, kept.squeezed, kept.stats, _dense(norm)
    assert gate is not None
    assert hidden is not None
    assert squeezed is not None
    assert stats is not None
    grad_logit, grad_hidden = torch.empty_like(gate), torch.empty_like(hidden)
    squeeze_grad, grads = torch.empty_like(gate), SEWeights(*map(torch.empty_like, se))
    of_maps, of_weights = _grads(
        kept.y, _dtypes(norm), hidden.shape[1], len(partial) // len(gate), norm.blur, TILE,
        WEIGHTS_TILE,
    )  # fmt: skip
    launch(
        of_maps, partial=partial, stats=stats, bias=norm.beta.contiguous(), gate=gate,
        hidden=hidden, fc1_weight=se.fc1_weight, fc2_weight=se.fc2_weight, grad_logit=grad_logit,
        grad_hidden=grad_hidden, squeeze_grad=squeeze_grad,
    )  # fmt: skip
    launch(
        of_weights, squeezed=squeezed, hidden=hidden, grad_logit=grad_logit,
        grad_hidden=grad_hidden, **grads._asdict(),
    )  # fmt: skip
    return squeeze_grad, grads


@by_form
def _grads(
    x: Tensor, processors: int, reduced: int, splits: int, blur: bool, tile: tuple[int, int, int],
    weights_tile: tuple[int, int]
) -> tuple[Form, Form]:  # fmt: skip
    (n, channels), (bn, bi, bj), (samples, side) = x.shape[:2], tile, weights_tile
    pixels = (halved(x) if blur else geometry(x, as_one_sample=False)).p
    of_maps = Form(
        "excite.excite_grads", WARPS, (-(-n // bn),), N=n, C=channels, R=reduced, splits=splits,
        count=float(pixels), BN=bn, BI=bi, BJ=bj,
    )  # fmt: skip
    squares = -(-channels // side) * -(-reduced // side)
    of_weights = Form(
        "excite.excite_weight_grads", 4, (squares, 2), N=n, C=channels, R=reduced, BN=samples,
        BW=side,
    )  # fmt: skip
    return of_maps, of_weights
