"""Launches of the kernels of squeeze and excitation; `reference` defines each public function."""

import torch
from torch import Tensor

from tresnet.ops.abn.launch import Chunks, ChunkSums
from tresnet.ops.abn.types import Norm, Saved, SEWeights
from tresnet.ops.launching import LaunchSpec, launch
from tresnet.ops.tiles import cached_per_layout, geometry, halved

# A program covers 4 samples, and loads tiles of 32 x 128 weights. So a batch of 256 has 64
# programs, and each has a multiprocessor to itself. In stage 3 of tresnet_m, a program reads
# 256 KiB of weights in 18 iterations of its loops. The 64 programs read 16 MiB from the L2 cache,
# in 3 microseconds. With tensor cores, a program would need 16 samples, and 72 iterations. cuBLAS
# would move as many bytes, but would need ten more launches.
TILE = 4, 32, 128
WEIGHTS_TILE = 64, 16  # a program loads 64 samples at once, for gradients of 16 x 16 weights
WARPS = 16


def forward(
    sums: ChunkSums, saved: Saved, norm: Norm, *, linear: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the squeezed maps (N, C), the hidden layer (N, R) and the gate (N, C), all float32.

    `sums` is the result of `tresnet.ops.abn.launch.squeeze`. With `linear`, neither activation nor
    blur comes before the SE, and `sums` is the second result of `abn.launch.statistics`.
    """
    (partial, chunks), se = sums, norm.se
    assert se is not None
    samples, channels = saved.y.shape[:2]
    squeezed, gate = partial.new_empty(samples, channels), partial.new_empty(samples, channels)
    reduced = se.fc1_weight.shape[0]
    hidden = partial.new_empty(samples, reduced)
    spec = _excite(saved.y, _dtypes(norm), reduced, chunks, linear, TILE)
    launch(
        spec, partial=partial, stats=saved.stats if linear else None, bias=norm.beta,
        **se._asdict(), squeezed=squeezed, hidden=hidden, gate=gate,
    )  # fmt: skip
    return squeezed, hidden, gate


def _dtypes(norm: Norm) -> tuple[torch.dtype, ...]:
    return tuple(part.dtype for part in (norm.beta, *(norm.se or ())))


@cached_per_layout
def _excite(
    x: Tensor, dtypes: tuple[torch.dtype, ...], reduced: int, chunks: Chunks, linear: bool,
    tile: tuple[int, int, int],
) -> LaunchSpec:  # fmt: skip
    (n, channels), (bn, bi, bj) = x.shape[:2], tile
    return LaunchSpec(
        "excite.kernels.excite", WARPS, (-(-n // bn),), N=n, C=channels, R=reduced,
        P=chunks.pixels, splits=chunks.splits, chunk=chunks.size, LINEAR=linear, BN=bn, BI=bi,
        BJ=bj,
    )  # fmt: skip


def backward(sums: ChunkSums, saved: Saved, norm: Norm) -> tuple[Tensor, SEWeights]:
    """Return `Sums.squeeze_grad` (N, C), and the gradients of the SE's weights and biases.

    `sums` is the first result of `tresnet.ops.abn.launch.grad_sums`. Each weight's gradient has the
    weight's dtype.
    """
    (partial, chunks), se = sums, norm.se
    gate = saved.gate if saved.excited is None else saved.excited
    hidden, squeezed = saved.hidden, saved.squeezed
    assert se is not None
    assert gate is not None
    assert hidden is not None
    if saved.drop_path_scale is not None:  # a sample that was dropped gives the SE no gradient
        of_samples = partial.view(len(gate), -1, *partial.shape[1:])
        partial = (of_samples * saved.drop_path_scale[:, None, None]).view(partial.shape)
    grad_logit, grad_hidden = torch.empty_like(gate), torch.empty_like(hidden)
    squeeze_grad, grads = torch.empty_like(gate), SEWeights(*map(torch.empty_like, se))
    of_maps, of_weights = _grads(
        saved.y, _dtypes(norm), hidden.shape[1], chunks, norm.blur, TILE, WEIGHTS_TILE
    )
    launch(
        of_maps, partial=partial, stats=saved.stats, bias=norm.beta, gate=gate, hidden=hidden,
        fc1_weight=se.fc1_weight, fc2_weight=se.fc2_weight, grad_logit=grad_logit,
        grad_hidden=grad_hidden, squeeze_grad=squeeze_grad,
    )  # fmt: skip
    launch(
        of_weights, squeezed=squeezed, hidden=hidden, grad_logit=grad_logit,
        grad_hidden=grad_hidden, **grads._asdict(),
    )  # fmt: skip
    return squeeze_grad, grads


@cached_per_layout
def _grads(
    x: Tensor, dtypes: tuple[torch.dtype, ...], reduced: int, chunks: Chunks, blur: bool,
    tile: tuple[int, int, int], weights_tile: tuple[int, int],
) -> tuple[LaunchSpec, LaunchSpec]:  # fmt: skip
    (n, channels), (bn, bi, bj), (samples, side) = x.shape[:2], tile, weights_tile
    pixels = (halved(x) if blur else geometry(x, as_one_sample=False)).p
    of_maps = LaunchSpec(
        "excite.kernels.excite_grads", WARPS, (-(-n // bn),), N=n, C=channels, R=reduced,
        splits=chunks.splits, count=float(pixels), BN=bn, BI=bi, BJ=bj,
    )  # fmt: skip
    squares = -(-channels // side) * -(-reduced // side)
    of_weights = LaunchSpec(
        "excite.kernels.excite_weight_grads", 4, (squares, 2), N=n, C=channels, R=reduced,
        BN=samples, BW=side,
    )  # fmt: skip
    return of_maps, of_weights
