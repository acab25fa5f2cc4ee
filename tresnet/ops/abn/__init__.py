"""Activated batch normalisation: BN and leaky ReLU as one operation with one saved buffer."""

from typing import Literal

import torch
from torch import Tensor

from tresnet.errors import InputError
from tresnet.ops import recompute
from tresnet.ops.abn import reference
from tresnet.ops.abn.autograd import ActivatedBatchNorm

Impl = Literal["auto", "reference", "recompute"]


def abn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    *,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
    slope: float | None = 1e-2,
    impl: Impl = "auto",
) -> Tensor:
    """Normalise each channel, scale, shift and apply a leaky ReLU.

    Args:
        x: (N, C, ...), floating point.
        weight: (C,), gamma, of any sign.
        bias: (C,), beta.
        running_mean: (C,), updated in place while training.
        running_var: (C,), updated in place while training (unbiased).
        training: use the statistics of the batch.
        momentum: weight of the batch in the running statistics.
        eps: added to the variance.
        slope: negative slope of the leaky ReLU; None leaves the activation out.
        impl: "reference" is plain PyTorch; "recompute" saves `x` alone for backward and offers its
            output for recomputation; "auto" takes "recompute" in eager mode when a gradient is
            needed, and plain operators under `torch.compile`, export and tracing.

    Returns:
        (N, C, ...) in the dtype of `x`.

    Raises:
        InputError: `x` does not fit the parameters, a training batch has one value per channel, or
            `impl` is unknown.
    """
    tracing = torch.jit.is_tracing()
    if not tracing and (x.dim() < 2 or x.shape[1] != weight.shape[0]):
        raise InputError(f"abn expected (N, {weight.shape[0]}, ...), got {tuple(x.shape)}")
    if impl not in ("auto", "reference", "recompute"):
        raise InputError(f"abn expected impl 'auto', 'reference' or 'recompute', got {impl!r}")
    plain = torch.compiler.is_compiling() or tracing
    if training and not plain and x.numel() == x.shape[1]:
        raise InputError(
            f"batch statistics need more than one value per channel, got {tuple(x.shape)}: "
            "use a larger batch or image, or call model.eval()"
        )
    statistics = (running_mean, running_var)
    options = (training, momentum, eps, slope)
    wanted = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or bias.requires_grad
    )
    if impl == "reference" or (impl == "auto" and (plain or not wanted)):
        return reference.abn(x, weight, bias, *statistics, *options)
    y, scale, shift = ActivatedBatchNorm.apply(x, weight, bias, *statistics, *options)  # pyright: ignore[reportGeneralTypeIssues]
    recompute.offer(y, lambda a, b, c: reference.affine(a, b, c, slope), x, scale, shift)
    return y


__all__ = ["abn"]
