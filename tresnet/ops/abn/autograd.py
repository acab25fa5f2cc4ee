"""BN + activation that saves one buffer: its input, the output of the convolution before it.

The activation's sign and the normalised value are recomputed from that input in backward. The
output, which the next layer would keep, is offered for recomputation (`tresnet.ops.recompute`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tresnet.ops.abn.reference import affine

_backward = torch.ops.aten.native_batch_norm_backward.default
_leaky_backward = torch.ops.aten.leaky_relu_backward.default


class ActivatedBatchNorm(torch.autograd.Function):
    """BN + leaky ReLU; saves the input, the parameters and per-channel statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        training: bool,
        momentum: float,
        eps: float,
        slope: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the activation and the per-channel scale and shift that produce it from `x`."""
        y, mean, invstd = torch.native_batch_norm(
            x, weight, bias, running_mean, running_var, training, momentum, eps
        )
        if slope is not None:
            F.leaky_relu_(y, slope)
        if not training:
            mean, invstd = running_mean, torch.rsqrt(running_var + eps)
        scale = weight.to(mean.dtype) * invstd
        shift = bias.to(mean.dtype) - mean * scale
        ctx.save_for_backward(x, weight, running_mean, running_var, mean, invstd, scale, shift)
        ctx.settings = (training, eps, slope)
        ctx.mark_non_differentiable(scale, shift)
        ctx.set_materialize_grads(False)
        return y, scale, shift

    @staticmethod
    @once_differentiable  # pyright: ignore[reportArgumentType]
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Any, ...]:
        """Return the gradients of `x`, `weight` and `bias`; arXiv 1712.02616, section 3.1."""
        grad = grad_outputs[0]
        if grad is None:
            return (None,) * 9
        training, eps, slope = ctx.settings
        x, weight, running_mean, running_var, mean, invstd, scale, shift = ctx.saved_tensors
        if slope is not None:
            grad = _leaky_backward(grad, affine(x, scale, shift, None), slope, False)
        needs = list(ctx.needs_input_grad[:3])
        grad_x, grad_weight, grad_bias = _backward(
            grad, x, weight, running_mean, running_var, mean, invstd, training, eps, needs
        )
        return grad_x, grad_weight, grad_bias, *(None,) * 6
