"""In-place activated batch norm, to compare ours with: it saves its output and inverts it.

Backward recovers the normalised value from the activated output (arXiv 1712.02616, section 3.2),
where ours keeps the convolution's output and rewrites the activation from that. For measurements
only: training mode, one process.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tresnet.layers.norm import ABN
from tresnet.ops.abn.autograd import normalise

_backward = torch.ops.aten.native_batch_norm_backward.default
_leaky_backward = torch.ops.aten.leaky_relu_backward.default

# "published": gamma = |weight| + eps, never zero. "plain": gamma = weight, of either sign.
Gamma = Literal["published", "plain"]


class InvertingBatchNorm(torch.autograd.Function):
    """BN + leaky ReLU; saves the activated output and per-channel vectors."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        momentum: float,
        eps: float,
        slope: float | None,
        gamma: Gamma = "published",
        wide: bool = True,
    ) -> Tensor:
        """Return the activation, by the passes that ours takes.

        Args:
            ctx: autograd's.
            x: (N, C, ...), floating point.
            weight: (C,).
            bias: (C,), beta.
            running_mean: (C,), updated in place.
            running_var: (C,), updated in place.
            momentum: weight of the batch in the running statistics.
            eps: added to the variance, and to the published gamma.
            slope: negative slope of the leaky ReLU; None leaves the activation out.
            gamma: what the weight stands for.
            wide: invert 16-bit outputs in the statistics' float32, not in 16 bits: more exact, and
                without a compiler more passes.
        """
        factor = weight.abs() + eps if gamma == "published" else weight
        running = running_mean, running_var
        y, _, invstd = normalise(x, factor, bias, running, momentum, eps)
        if slope is not None:
            F.leaky_relu_(y, slope)
        ctx.save_for_backward(y, weight, factor, bias, invstd)
        ctx.settings = (eps, slope, gamma, wide)
        return y

    @staticmethod
    @once_differentiable  # pyright: ignore[reportArgumentType]
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Any, ...]:
        """Return the gradients of `x`, `weight` and `bias` from the output alone."""
        eps, slope, gamma, wide = ctx.settings
        y, weight, factor, bias, invstd = ctx.saved_tensors
        z = y
        if wide:
            z, grad = y.to(invstd.dtype), grad.to(invstd.dtype)
        if slope is not None:
            grad = _leaky_backward(grad, z, slope, True)
            z = F.leaky_relu(z, 1 / slope)
        # z = gamma * xhat + beta is itself the input of a normalisation by mean beta and deviation
        # gamma that gives xhat; its gradient times gamma / deviation of x is the gradient of x.
        factor, bias = factor.to(invstd.dtype), bias.to(invstd.dtype)
        grad_x, grad_weight, grad_bias = _backward(
            grad, z, factor.square() * invstd, None, None, bias, 1 / factor, True, eps, [True] * 3
        )
        if gamma == "published":
            grad_weight = torch.where(weight < 0, -grad_weight, grad_weight)
        return grad_x.to(y.dtype), grad_weight, grad_bias, *(None,) * 7


class InvertingABN(ABN):
    """The layer of `norm='abn'`, with the output inverted in backward."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise and activate `x`: (N, C, H, W) to the same shape and dtype."""
        return InvertingBatchNorm.apply(  # pyright: ignore[reportReturnType]
            x, self.weight, self.bias, *self._statistics(), self.momentum, self.eps, self.slope
        )

    def fuses(self, x: Any) -> bool:
        """Never: the kernels keep the input."""
        return False


def invert_in(model: nn.Module) -> nn.Module:
    """Make every `ABN` of a model an `InvertingABN`; what follows them goes on being rebuilt."""
    for module in model.modules():
        if type(module) is ABN:
            module.__class__ = InvertingABN
    return model


class InplaceByPackage:
    """The inplace-abn package as a function that leaves its argument alone.

    It overwrites its input. Here it overwrites a copy, made when it first sees an input and used
    again for that input ever after, so that no copying is timed; then the values are other ones.
    """

    def __init__(self, momentum: float, eps: float, slope: float | None) -> None:
        """Look for the package.

        Raises:
            MissingDependencyError: it is not installed.
        """
        from tresnet.layers.norm import inplace_abn_function

        self._function = inplace_abn_function()
        self._copies: dict[int, Tensor] = {}
        activation = ("identity", 0.01) if slope is None else ("leaky_relu", slope)
        self._settings = (True, momentum, eps, *activation)

    def __call__(self, x: Tensor, *vectors: Tensor) -> Tensor:
        """Run on the copy of `x`; the gradient is that of `x`."""
        key = x.data_ptr()
        if key not in self._copies:
            self._copies[key] = x.detach().clone()
        return self._function(_StandIn.apply(x, self._copies[key]), *vectors, *self._settings)


class _StandIn(torch.autograd.Function):
    """Another tensor in the place of the first, which gets its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        alias = torch.empty(0, dtype=x.dtype, device=x.device)
        # Of the storage, for a view would refuse to be overwritten.
        return alias.set_(
            other.untyped_storage(), other.storage_offset(), other.shape, other.stride()
        )

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, None]:
        return grad, None
