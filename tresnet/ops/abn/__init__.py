"""Activated batch normalisation, and what follows it in a block, as one operation."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tresnet.errors import InputError
from tresnet.ops import recompute, tiles
from tresnet.ops.abn import launch, reference
from tresnet.ops.abn.fused import Convolution, Settings, excited, fused_abn
from tresnet.ops.abn.recomputed import ActivatedBatchNorm
from tresnet.ops.dispatch import Impl, check_impl, runs_kernels, traced


class SEWeights(NamedTuple):
    """The two layers of a squeeze and excitation, as linear layers.

    Attributes:
        fc1_weight: (R, C).
        fc1_bias: (R,).
        fc2_weight: (C, R).
        fc2_bias: (C,).
    """

    fc1_weight: Tensor
    fc1_bias: Tensor
    fc2_weight: Tensor
    fc2_bias: Tensor


def abn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    *,
    se: SEWeights | None = None,
    shortcut: Tensor | None = None,
    impl: Impl = "auto",
    **settings: Any,
) -> Tensor:
    """Normalise each channel, scale, shift, apply a leaky ReLU; then blur, excite and join.

    y = act(weight * (x - mean) / sqrt(var + eps) + bias), and where asked for
    y = blur(y), y = y * gate(mean of y over pixels), y = relu(y + shortcut), in this order.

    Args:
        x: (N, C, ...), floating point.
        weight: (C,), gamma, of any sign.
        bias: (C,), beta.
        running_mean: (C,), updated in place while training.
        running_var: (C,), updated in place while training (unbiased).
        se: squeeze, two layers, sigmoid, scale; computed in float32.
        shortcut: added before a ReLU; shape and dtype of what it is added to.
        impl: "triton" runs fused kernels with float32 statistics (float32, bfloat16, float16);
            "reference" plain operators; "auto" the kernels on a GPU where they were found right, in
            eager mode, else plain operators. Under export, tracing and the transforms of
            `torch.func` plain operators run, whatever is asked for. Where recomputation is asked
            for (`tresnet.ops.recompute.scope`), either saves `x` alone for backward and offers its
            output, which plain operators do without blur, se and shortcut only.
        **settings: fields of `Settings`, of which `training` must be given.

    Returns:
        (N, C, ...), or (N, C, ceil(H / 2), ceil(W / 2)) with `blur`, in the dtype of `x`.

    Raises:
        InputError: `x` does not fit the parameters, a training batch has one value per channel, or
            `impl` is unknown or cannot run here.
    """
    if not torch.jit.is_tracing() and (x.dim() < 2 or x.shape[1] != weight.shape[0]):
        raise InputError(f"abn expected (N, {weight.shape[0]}, ...), got {tuple(x.shape)}")
    check_impl("abn", impl)
    chosen, plain = Settings(**settings), traced()
    shared = chosen.training and chosen.group is not None
    if chosen.training and not plain and not shared and x.numel() == x.shape[1]:
        raise InputError(
            f"batch statistics need more than one value per channel, got {tuple(x.shape)}: "
            "use a larger batch or image, or call model.eval()"
        )
    running = (running_mean, running_var)
    if runs_kernels(x, impl, shared=shared):
        _check_vectors(x, bias, *running, *(se[2:] if se else ()))
        _check_tail(x, chosen.blur, shortcut)
        return fused_abn(x, weight, bias, running, shortcut, se, chosen)[0]
    if shared:
        raise InputError("synchronised statistics need impl='triton', which cannot run here")
    options = (chosen.training, chosen.momentum, chosen.eps, chosen.slope)
    tail = chosen.blur or se is not None or shortcut is not None
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (x, weight, bias))
    if plain or tail or not (wanted and recompute.active()) or x.numel() == 0:
        y = reference.abn(x, weight, bias, *running, *options)
        return reference.tail(y, chosen.blur, se, shortcut)
    y, scale, shift = ActivatedBatchNorm.apply(x, weight, bias, *running, *options)  # pyright: ignore[reportGeneralTypeIssues]
    recompute.offer(y, lambda a, b, c: reference.affine(a, b, c, chosen.slope), x, scale, shift)
    return y


def shift(
    x: Tensor,
    bias: Tensor,
    slope: float | None,
    blur: bool,
    se: SEWeights | None,
    shortcut: Tensor | None,
) -> Tensor:
    """What `abn` does behind the norm, by the kernels, where a convolution has the norm folded in.

    For inference: it has no gradient.

    Args:
        x: (N, C, H, W), the convolution's output without its bias.
        bias: (C,), of the convolution.
        slope: negative slope of the leaky ReLU; None leaves the activation out.
        blur: as `blur_pool`.
        se: as in `abn`.
        shortcut: added before a ReLU; shape and dtype of what it is added to.

    Returns:
        (N, C, H, W), or half the height and width with `blur`, in the dtype of `x`.

    Raises:
        InputError: something does not fit `x`.
    """
    _check_vectors(x, bias, *(se[2:] if se else ()))
    _check_tail(x, blur, shortcut)
    x = tiles.dense(x)
    if shortcut is not None:
        shortcut = tiles.dense(shortcut, x)
    gate = None if se is None else excited(x, None, bias, None, slope, blur, se)[2]
    return launch.apply(x, None, bias, gate, shortcut, slope, blur)[0]


def _check_vectors(x: Tensor, *vectors: Tensor) -> None:
    """Raise `InputError` where a kernel would read or write beyond the end of a vector."""
    for vector in vectors:
        if vector.shape[:1] != x.shape[1:2]:
            raise InputError(
                f"expected parameters and statistics of {x.shape[1]} channels, as {tuple(x.shape)} "
                f"has, got one of shape {tuple(vector.shape)}"
            )


def _check_tail(x: Tensor, blur: bool, shortcut: Tensor | None) -> None:
    if blur and (x.dim() != 4 or min(x.shape[-2:]) < 2):
        raise InputError(
            f"blur expected (N, C, H, W) with H and W at least 2, got {tuple(x.shape)}: "
            "use larger images"
        )
    if shortcut is None:
        return
    if blur:
        raise InputError("expected a shortcut or a blur, got both: no block has both")
    if shortcut.shape != x.shape or shortcut.dtype != x.dtype:
        raise InputError(
            f"expected a shortcut of {tuple(x.shape)} in {x.dtype}, "
            f"got {tuple(shortcut.shape)} in {shortcut.dtype}"
        )


__all__ = ["Convolution", "SEWeights", "Settings", "abn", "fused_abn", "shift"]
