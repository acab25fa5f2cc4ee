"""Subtracted convolution that keeps its input and its factors alone for backward."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tresnet.ops import twice
from tresnet.ops.subtracted_conv import reference

_conv_backward = torch.ops.aten.convolution_backward.default


def _gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    needs: tuple[bool, bool],
    *,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
) -> tuple[Any, Any]:
    """Return the gradients of a convolution's input and weight, None where not needed."""
    pairs = [[value, value] for value in (stride, padding, dilation)]
    grad_x, grad_weight, _ = _conv_backward(
        grad, x, weight, None, *pairs, False, [0, 0], groups, [*needs, False]
    )
    return grad_x, grad_weight


def _plain_gradients(ctx: Any, function: Callable[..., Tensor], grad: Tensor) -> tuple[Any, ...]:
    """Return gradients that can be differentiated again, of `function` in the dtype of x."""

    def plain(x: Tensor, *factors: Tensor) -> Tensor:
        return function(x, *(factor.to(x.dtype) for factor in factors), ctx.stride)

    return *twice.gradients(plain, ctx.saved_tensors, ctx.needs_input_grad[:4], grad), None


class Composed(torch.autograd.Function):
    """One convolution whose weight is composed from the factors, in forward and in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, point: Tensor, depth: Tensor, low: Tensor, stride: int
    ) -> Tensor:
        """Return the output; see `reference.composed`."""
        ctx.save_for_backward(x, point, depth, low)
        ctx.stride = stride
        weight = reference.compose(point, depth, low).to(x.dtype)
        return F.conv2d(x, weight, None, *reference.geometry(depth.shape[-1], stride))

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Any, ...]:
        """Return the gradients of the input and the three factors."""
        x, *factors = ctx.saved_tensors
        if twice.wanted():
            return _plain_gradients(ctx, reference.composed, grad)
        needed = any(ctx.needs_input_grad[1:4])
        kernel = reference.compose(*factors).to(x.dtype)
        stride, padding, dilation = reference.geometry(factors[1].shape[-1], ctx.stride)
        needs = (ctx.needs_input_grad[0], needed)
        grad_x, grad_weight = _gradients(
            grad, x, kernel, needs, stride=stride, padding=padding, dilation=dilation
        )
        if not needed:
            return grad_x, None, None, None, None
        return grad_x, *_of_factors(grad_weight.to(factors[0].dtype), *factors), None


def _of_factors(
    grad: Tensor, point: Tensor, depth: Tensor, low: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the factors from that of `reference.compose(point, depth, low)`.

    Written out, because a backward within a backward cannot run on the fake tensors of
    `tresnet.memory`.
    """
    upper, lower = grad.chunk(2)
    p = point[:, :, 0, 0]
    grad_depth = torch.einsum("miuv,mi->muv", upper, p)[:, None]
    grad_low = torch.einsum("oiuv,mi->omuv", lower, p)
    grad_point = torch.einsum("miuv,muv->mi", upper, reference.high_pass(depth)[:, 0])
    grad_point += torch.einsum("oiuv,omuv->mi", lower, low)
    return grad_point[..., None, None], grad_depth, grad_low


class Recomputed(torch.autograd.Function):
    """The three convolutions, P x computed a second time in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, point: Tensor, depth: Tensor, low: Tensor, stride: int
    ) -> Tensor:
        """Return the output; see `reference.branches`."""
        ctx.save_for_backward(x, point, depth, low)
        ctx.stride = stride
        point, depth, low = (factor.to(x.dtype) for factor in (point, depth, low))
        return reference.branches(x, point, depth, low, stride)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Any, ...]:
        """Return the gradients of the input and the three factors."""
        x, *factors = ctx.saved_tensors
        if twice.wanted():
            return _plain_gradients(ctx, reference.branches, grad)
        point, depth, low = (factor.to(x.dtype) for factor in factors)
        half, border = depth.shape[0], depth.shape[-1] // 2
        needs_x, needs_point, needs_depth, needs_low = ctx.needs_input_grad[:4]
        p = F.conv2d(x, point, stride=ctx.stride)
        upper, lower = (part.contiguous() for part in grad.split(half, dim=1))
        grad_p, grad_depth = _gradients(
            upper, p, depth, (True, needs_depth), padding=border, groups=half
        )
        grad_p -= upper
        more, grad_low = _gradients(lower, p, low, (True, needs_low), padding=border)
        grad_p += more
        del p, more
        grad_x, grad_point = _gradients(grad_p, x, point, (needs_x, needs_point), stride=ctx.stride)
        grads = (grad_point, grad_depth, grad_low)
        return (
            grad_x,
            *(g if g is None else g.to(w.dtype) for g, w in zip(grads, factors, strict=True)),
            None,
        )
