"""The operation of `tresnet.ops.abn` for autograd, as `tresnet.fused` runs it."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.ops import plain
from tresnet.fused.run import commit, eval_stats
from tresnet.layers.norm import ABN
from tresnet.ops import abn as kernels
from tresnet.ops import tiles
from tresnet.ops.abn import Norm, SEWeights, reference


class Launched(torch.autograd.Function):
    """Forward and backward by kernels, or by their definitions."""

    @staticmethod
    def forward(ctx: Any, ops: Any, rest: dict[str, Any], x, shortcut, stats, *vectors: Tensor):
        gamma, beta, *layers = vectors
        x = tiles.dense(x)
        shortcut = None if shortcut is None else tiles.dense(shortcut, x)
        norm = Norm(gamma, beta, stats, se=SEWeights(*layers) if layers else None, **rest)
        y, ctx.saved = ops.forward(x, norm, shortcut=shortcut, saves=True)
        ctx.norm, ctx.ops, ctx.joins = norm, ops, shortcut is not None
        ctx.mark_non_differentiable(ctx.saved.stats)
        return y, ctx.saved.stats

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        norm, saved, ops = ctx.norm, ctx.saved, ctx.ops
        grad = tiles.dense(grads[0], saved.y)
        joins = ctx.joins
        halves = (grad / 2, grad / 2) if joins else (grad, None)  # of two readers
        rebuilds = not norm.blur and not joins
        sums = ops.gradient_sums(*halves, norm, saved, rebuilds=rebuilds)
        source, shortcut = (sums.masked_grad, sums.masked_grad) if joins else (grad, None)
        if rebuilds:
            again = reference.rebuild(norm, saved)
            torch.testing.assert_close(sums.rebuilt, again, rtol=1e-2, atol=1e-5, equal_nan=True)
        grad_x = ops.gradient(source, norm, saved, sums)
        vectors = (
            part.to(tensor.dtype)
            for part, tensor in zip(sums.grads, norm.tensors(), strict=True)
            if part is not None
        )
        return None, None, grad_x, shortcut, None, *vectors


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
    training: bool = True,
    **options: Any,
) -> Tensor:
    """Run by the kernels ('triton'), by their definitions ('definitions'), or by 'reference'."""
    options = {"slope": 1e-2, "blur": False, **options}
    if impl == "reference":
        blur, slope = options.pop("blur"), options.pop("slope")
        norm = Norm(weight, bias, se=se, slope=slope, blur=blur)
        return plain(x, norm, shortcut, (mean, var), training)
    norm = ABN(len(weight), device="meta").train(training)
    norm.weight, norm.bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
    norm.running_mean, norm.running_var = mean, var
    norm.num_batches_tracked = torch.zeros((), dtype=torch.long, device=mean.device)
    stats = None if training else eval_stats([(0, norm)])[0]
    ops = kernels if impl == "triton" else reference
    y, stats = Launched.apply(ops, options, x, shortcut, stats, weight, bias, *(se or ()))
    if training:
        commit([norm], [stats])
    return y


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
    gamma, beta = (meta(channels, offset=offset * number).requires_grad_() for number in range(2))
    layers = excitation(channels, reduced, offset) if se else ()
    shortcut = torch.empty_like(x) if join else None
    options = {"slope": 1e-2, "blur": False, **options}
    y, _ = Launched.apply(kernels, options, x, shortcut, None, gamma, beta, *layers)
    y.sum().backward()
