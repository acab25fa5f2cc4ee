"""Gradients that can be differentiated again, of operations whose own backward cannot.

`torch.autograd.function.once_differentiable` does not keep a wrong second derivative from anyone:
its error shows in `Tensor.backward()` alone, and `torch.autograd.grad` returns what the paths
around the operation give. Where a graph of backward is wanted (`create_graph=True`), the
operation's plain definition runs again instead, at its cost in time and memory.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tresnet.ops.autocast import autocast_off


def wanted() -> bool:
    """Whether the backward that runs is recorded, to be differentiated itself."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def gradients(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    grad: Tensor,
) -> list[Tensor | None]:
    """Gradients of `function(*inputs)` as functions of the inputs and of `grad`.

    Args:
        function: the plain definition, called outside autocast.
        inputs: as backward finds them saved.
        needs: which of them want a gradient.
        grad: of the output.

    Returns:
        One for each input, None where it wants none.
    """
    wanting = [part for part, need in zip(inputs, needs, strict=True) if need and part is not None]
    with autocast_off(grad.device.type):
        y = function(*inputs)
        found = iter(torch.autograd.grad(y, wanting, grad, create_graph=True, allow_unused=True))
    return [
        next(found) if need and part is not None else None
        for part, need in zip(inputs, needs, strict=True)
    ]
