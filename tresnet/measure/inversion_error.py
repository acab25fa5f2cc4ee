"""How far an activated batch norm that inverts its output is from float64, and how far ours is.

Input and incoming gradient are values of the 16-bit type, so that what is counted is the norm's own
error alone. All channels of a case share gamma and the size of beta, for a sum over channels of
different scales would hide the small ones.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tresnet.measure.cases import DTYPES
from tresnet.measure.inverting import InvertingBatchNorm
from tresnet.ops.abn import abn

TENSORS = ("output", "grad_x", "grad_weight", "grad_bias")
SLOPES = (1e-2, 1e-3, 1e-6, None)
GAMMAS = (1.0, 1e-1, 1e-2, 1e-3, 1e-6, 0.0)
BETAS = (0.0, 0.1)
SHAPE = (8, 32, 14, 14)
MOMENTUM, EPS = 0.1, 1e-5
METHOD = {
    "x": "standard normal plus a mean of half that size for each channel, rounded to the dtype",
    "grad": "standard normal, rounded to the dtype",
    "beta": "of the given size, its sign alternating from channel to channel",
    "max": "largest absolute error over the largest absolute value in float64 (over 1 where all are 0)",
    "mean": "mean absolute error over the mean absolute value in float64 (over 1 where all are 0)",
    "inverting": "gamma = |weight| + eps, compared with float64 of that very gamma",
    "inverting_plain": "gamma = weight",
}


@dataclasses.dataclass(frozen=True)
class TensorError:
    """Error of one tensor against float64.

    Attributes:
        max: of the finite values, see `METHOD`; None if there are none.
        mean: likewise.
        not_finite: how many values are NaN or infinite.
    """

    max: float | None
    mean: float | None
    not_finite: int

    def worst(self) -> float:
        """The largest error; infinite if there are values that are not finite."""
        return float("inf") if self.not_finite or self.max is None else self.max


@dataclasses.dataclass(frozen=True)
class ErrorRow:
    """Errors of one implementation in one case.

    Attributes:
        variant: `batchnorm` (plain PyTorch), `recompute` or `triton` (ours), `inverting`, or
            `inverting_plain`.
        dtype: of input, output and their gradients; parameters and arithmetic are float32.
        slope: of the leaky ReLU; None for no activation.
        gamma: the weight of all channels.
        beta: the absolute bias of all channels.
        errors: by the names in `TENSORS`.
    """

    variant: str
    dtype: str
    slope: float | None
    gamma: float
    beta: float
    errors: dict[str, TensorError]


Norm = Callable[..., Tensor]


def _ours(impl: Any, slope: float | None) -> Norm:
    options: dict[str, Any] = {"momentum": MOMENTUM, "eps": EPS, "slope": slope, "impl": impl}
    return lambda *inputs: abn(*inputs, training=True, **options)


def _inverting(gamma: Any, slope: float | None) -> Norm:
    return lambda *inputs: InvertingBatchNorm.apply(*inputs, MOMENTUM, EPS, slope, gamma)  # pyright: ignore[reportReturnType]


def measure_errors(
    dtypes: Sequence[str],
    device: torch.device,
    *,
    slopes: Sequence[float | None] = SLOPES,
    gammas: Sequence[float] = GAMMAS,
    betas: Sequence[float] = BETAS,
    shape: tuple[int, ...] = SHAPE,
    seed: int = 0,
) -> list[ErrorRow]:
    """Errors of every implementation in every case.

    Args:
        dtypes: fp32, bf16 or fp16.
        device: where to compute.
        slopes: of the leaky ReLU.
        gammas: weights.
        betas: sizes of the bias.
        shape: (N, C, H, W).
        seed: of the inputs.
    """
    generator = torch.Generator().manual_seed(seed)
    means = 0.5 * torch.randn(1, shape[1], 1, 1, generator=generator)
    x, grad = torch.randn(2, *shape, generator=generator)
    signs = 1.0 - 2.0 * (torch.arange(shape[1], device=device) % 2)
    rows = []
    for dtype, slope, gamma, beta in itertools.product(dtypes, slopes, gammas, betas):
        maps = [one.to(device, DTYPES[dtype]) for one in (x + means, grad)]
        weight = torch.full((shape[1],), gamma, device=device)
        for variant, (norm, factor) in _variants(slope, weight, device).items():
            exact = [one.double() for one in (*maps, factor, beta * signs)]
            truth = _computed(_ours("reference", slope), exact)
            found = _computed(norm, [*maps, weight, beta * signs])
            errors: dict[str, TensorError] = {
                name: tensor_error(*pair) for name, *pair in zip(TENSORS, found, truth, strict=True)
            }
            rows.append(ErrorRow(variant, dtype, slope, gamma, beta, errors))
    return rows


def _variants(
    slope: float | None, weight: Tensor, device: torch.device
) -> dict[str, tuple[Norm, Tensor]]:
    """Each implementation, and the gamma that the weight means to it."""
    ours = ("recompute", "triton") if device.type == "cuda" else ("recompute",)
    return {
        "batchnorm": (_ours("reference", slope), weight),
        **{impl: (_ours(impl, slope), weight) for impl in ours},
        "inverting": (_inverting("published", slope), weight + EPS),
        "inverting_plain": (_inverting("plain", slope), weight),
    }


def _computed(norm: Norm, values: Sequence[Tensor]) -> list[Tensor]:
    """Output and gradients in the order of `TENSORS`, from x, the incoming gradient, weight and bias."""
    x, grad, weight, bias = values
    inputs = [one.clone().requires_grad_() for one in (x, weight, bias)]
    running = torch.zeros_like(weight), torch.ones_like(weight)
    y = norm(*inputs, *running)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


def tensor_error(found: Tensor, truth: Tensor) -> TensorError:
    """Compare a tensor with its float64 value; see `METHOD`."""
    finite = found.isfinite()
    off = (found.double() - truth).abs()[finite]
    size = truth.abs()
    if not len(off):
        return TensorError(None, None, found.numel())
    largest, average = float(size.max()) or 1.0, float(size.mean()) or 1.0
    lost = int(found.numel() - finite.sum())
    return TensorError(float(off.max()) / largest, float(off.mean()) / average, lost)
