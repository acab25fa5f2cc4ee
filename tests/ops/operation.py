"""The operation of `tresnet.ops.abn` for autograd, as `tresnet.fused` runs it."""

from typing import Any

import torch
from torch import Tensor

from tresnet.ops import tiles
from tresnet.ops.abn import Norm, SEWeights, forward, gradient, gradient_sums, reference


class Launched(torch.autograd.Function):
    """Forward and backward by kernels, or by their definitions."""

    @staticmethod
    def forward(ctx: Any, kernels: bool, rest: dict[str, Any], x, shortcut, *vectors: Tensor):
        gamma, beta, mean, var, *layers = vectors
        x = tiles.dense(x)
        shortcut = None if shortcut is None else tiles.dense(shortcut, x)
        norm = Norm(gamma, beta, mean, var, se=SEWeights(*layers) if layers else None, **rest)
        y, ctx.kept = forward(x, norm, kernels=kernels, shortcut=shortcut, keeps=True)
        ctx.norm, ctx.kernels, ctx.joins = norm, kernels, shortcut is not None
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        norm, kept, kernels = ctx.norm, ctx.kept, ctx.kernels
        grad = tiles.dense(grads[0], kept.y)
        joins = ctx.joins
        halves = (grad / 2, grad / 2) if joins else (grad, None)  # of two readers
        rebuilds = not norm.blur and not joins
        sums = gradient_sums(*halves, norm, kept, kernels=kernels, rebuilds=rebuilds)
        source, shortcut = (sums.written, sums.written) if joins else (grad, None)
        if rebuilds and kept.y.numel():
            again, _ = reference.apply(kept, norm, None, keeps_bits=False)
            torch.testing.assert_close(sums.written, again, rtol=1e-2, atol=1e-5, equal_nan=True)
        grad_x = gradient(source, norm, kept, sums, kernels=kernels)
        vectors = (part.to(norm.gamma.dtype) for part in sums.merged[:2])
        return None, None, grad_x, shortcut, *vectors, None, None, *(sums.se or ())


def abn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    se: SEWeights | None = None,
    shortcut: Tensor | None = None,
    impl: str = "triton",
    **options: Any,
) -> Tensor:
    """Run by the kernels ('triton'), by their definitions ('launches'), or by 'reference'."""
    options = {"momentum": 0.1, "eps": 1e-5, "slope": 1e-2, "blur": False, **options}
    if impl == "reference":
        blur = options.pop("blur")
        y = reference.abn(x, weight, bias, mean, var, **options)
        return reference.tail(y, blur, se, shortcut)
    vectors = weight, bias, mean, var, *(se or ())
    return Launched.apply(impl == "triton", options, x, shortcut, *vectors)


def meta(*shape: int, offset: int = 0, **options: Any) -> Tensor:
    """Return a tensor without values, `offset` elements behind the beginning of its storage."""
    whole = torch.empty(offset + torch.Size(shape).numel(), device="meta", **options)
    return whole[offset:].view(shape)


def excitation(channels: int, reduced: int, offset: int = 0) -> SEWeights:
    """Return the layers of an SE without values."""
    shapes = (reduced, channels), (reduced,), (channels, reduced), (channels,)
    return SEWeights(*(meta(*shape, offset=offset * (len(shape) == 1)) for shape in shapes))


def launch_all(
    x: Tensor, *, se: bool, join: bool, reduced: int = 3, offset: int = 0, **options: Any
) -> None:
    """Run forward and backward on `meta`, with vectors that begin `offset` elements apart."""
    channels, x = x.shape[1], x.detach().requires_grad_()
    vectors = (meta(channels, offset=offset * number) for number in range(4))
    layers = excitation(channels, reduced, offset) if se else None
    shortcut = torch.empty_like(x) if join else None
    abn(x, *vectors, training=True, se=layers, shortcut=shortcut, **options).sum().backward()
