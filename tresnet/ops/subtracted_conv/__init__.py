"""Three linear convolutions as one operation: concat(D P x - P x, L P x)."""

from typing import Literal

import torch
from torch import Tensor

from tresnet.errors import InputError
from tresnet.ops.autocast import autocast_dtype, autocast_off
from tresnet.ops.dispatch import traced
from tresnet.ops.subtracted_conv import reference
from tresnet.ops.subtracted_conv.autograd import Composed, Recomputed

Mode = Literal["branches", "composed", "recompute"]
MODES = ("branches", "composed", "recompute")


def subtracted_conv(
    x: Tensor,
    point: Tensor,
    depth: Tensor,
    low: Tensor,
    stride: int = 1,
    *,
    mode: Mode = "composed",
) -> Tensor:
    """Return concat(D P x - P x, L P x), whose three modes differ in what backward keeps.

    Kept per call, with n pixels of output, N images and 2 h channels out: 'branches' keeps x and
    P x (h N n values); 'composed' and 'recompute' keep x alone. 'composed' computes the weight of
    one k x k convolution from the factors in forward and again in backward; 'recompute' runs the
    three convolutions, and P once more in backward.

    Args:
        x: (N, C, H, W), floating point.
        point: P, (h, C, 1, 1).
        depth: D, (h, 1, k, k), k odd.
        low: L, (h, h, k, k).
        stride: of P, in both directions.
        mode: 'branches', 'composed' or 'recompute'. Under `torch.compile`, export and tracing the
            compiler decides what is kept, and 'recompute' is 'branches'.

    Returns:
        (N, 2 h, ceil(H / stride), ceil(W / stride)); under autocast in its dtype.

    Raises:
        InputError: an unknown mode, or an input that is not (N, C, H, W) or of another type than
            the weights.
    """
    if mode not in MODES:
        raise InputError(f"expected mode out of {', '.join(MODES)}, got {mode!r}")
    if x.dim() != 4 or x.shape[1] != point.shape[1]:
        raise InputError(
            f"subtracted_conv expected (N, {point.shape[1]}, H, W), got {tuple(x.shape)}"
        )
    plain = traced() or not torch.is_grad_enabled()
    cast = autocast_dtype(x.device.type)
    if x.dtype != point.dtype and cast is None:
        raise InputError(f"subtracted_conv expected {point.dtype} as its weights, got {x.dtype}")
    if mode == "branches" or (plain and mode == "recompute"):
        return reference.branches(x, point, depth, low, stride)
    if plain:
        return reference.composed(x, point, depth, low, stride)
    if cast is not None and x.dtype != torch.float64:  # as convolutions do
        x = x.to(cast)
    function = Composed if mode == "composed" else Recomputed
    with autocast_off(x.device.type):
        return function.apply(x, point, depth, low, stride)  # pyright: ignore[reportReturnType]


__all__ = ["MODES", "Mode", "subtracted_conv"]
