"""The operation of `tresnet.ops.epilogue`, run forward and backward as `tresnet.fused` runs it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tresnet.ops import epilogue as kernels
from tresnet.ops import tiles
from tresnet.ops.epilogue import Epilogue, SEWeights, definition


def run_both_ways(
    ops: Any,
    x: Tensor,
    epilogue: Epilogue,
    shortcut: Tensor | None,
    grad_of: Callable[[Tensor], Tensor],
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return the output, all gradients and the statistics, by kernels or by their definitions.

    The gradients are those of x, gamma, beta, the layers of the SE, and the shortcut.
    """
    y, saved = ops.forward(x, epilogue, shortcut=shortcut, saves=True)
    source, joins = tiles.dense(grad_of(y)), shortcut is not None
    halves = (source / 2, source / 2) if joins else (source, None)  # of two readers
    rebuilds = not epilogue.blur and not joins
    sums = ops.gradient_sums(*halves, epilogue, saved, rebuilds=rebuilds)
    source = sums.masked_grad if joins else source
    if rebuilds:
        again = definition.rebuild(epilogue, saved)
        torch.testing.assert_close(sums.rebuilt, again, rtol=1e-2, atol=1e-5, equal_nan=True)
    vectors = zip(sums.grads, epilogue.tensors(), strict=True)
    grads = [part.to(tensor.dtype) for part, tensor in vectors if part is not None]
    of_shortcut = [source] if joins else []
    return y, [ops.gradient(source, epilogue, saved, sums), *grads, *of_shortcut], saved.stats


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
    channels = x.shape[1]
    gamma, beta = (meta(channels, offset=offset * number) for number in range(2))
    layers = excitation(channels, reduced, offset) if se else None
    epilogue = Epilogue(gamma, beta, se=layers, **{"slope": 1e-2, "blur": False, **options})
    shortcut = torch.empty_like(x) if join else None
    run_both_ways(kernels, x, epilogue, shortcut, torch.empty_like)
