"""BN + activation that saves one buffer: its input, the output of the convolution before it.

The activation's sign and the normalised value are recomputed from that input in backward. The
output, which the next layer would keep, is offered for recomputation (`tresnet.ops.recompute`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tresnet.ops import twice
from tresnet.ops.abn.reference import abn, affine

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
        running = running_mean, running_var
        if training:
            y, mean, invstd = torch.native_batch_norm(
                x, weight, bias, *running, True, momentum, eps
            )
        else:
            y = torch.native_batch_norm(x, weight, bias, *running, False, momentum, eps)[0]
            mean, invstd = running_mean, torch.rsqrt(running_var + eps)
        if slope is not None:
            F.leaky_relu_(y, slope)
        scale = weight.to(mean.dtype) * invstd
        shift = bias.to(mean.dtype) - mean * scale
        ctx.save_for_backward(
            x, weight, bias, running_mean, running_var, mean, invstd, scale, shift
        )
        ctx.settings = (training, eps, slope)
        ctx.mark_non_differentiable(scale, shift)
        ctx.set_materialize_grads(False)
        return y, scale, shift

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Any, ...]:
        """Return the gradients of `x`, `weight` and `bias`; arXiv 1712.02616, section 3.1."""
        grad = grad_outputs[0]
        if grad is None:
            return (None,) * 9
        training, eps, slope = ctx.settings
        x, weight, bias, running_mean, running_var, mean, invstd, scale, shift = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:3])
        if twice.wanted():
            running = running_mean.clone(), running_var.clone()

            def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
                return abn(x, weight, bias, *running, training, 0.0, eps, slope)

            return *twice.gradients(plain, (x, weight, bias), needs, grad), *(None,) * 6
        if slope is not None:
            grad = _leaky_backward(grad, affine(x, scale, shift, None), slope, False)
        grad_x, grad_weight, grad_bias = _backward(
            grad, x, weight, running_mean, running_var, mean, invstd, training, eps, needs
        )
        return grad_x, grad_weight, grad_bias, *(None,) * 6
