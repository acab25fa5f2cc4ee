"""How functions and methods inside a branch carry over to the merged module."""

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from tresnet.errors import InputError
from tresnet.surgery.merge_rules import State

_BINARY: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((operator.add, operator.iadd, torch.add, "add", "add_"), torch.add),
    **dict.fromkeys((operator.sub, operator.isub, torch.sub, "sub", "sub_"), torch.sub),
    **dict.fromkeys((operator.mul, operator.imul, torch.mul, "mul", "mul_"), torch.mul),
}
_ELEMENTWISE = {
    *(torch.relu, torch.relu_, F.relu, F.relu_, F.leaky_relu, F.leaky_relu_, F.silu, F.gelu),
    *(torch.sigmoid, torch.tanh, F.hardswish, F.hardsigmoid, F.elu, operator.neg),
    *("relu", "relu_", "sigmoid", "tanh", "contiguous", "clone"),
}
_POOLS = {F.max_pool2d, F.avg_pool2d, F.adaptive_max_pool2d, F.adaptive_avg_pool2d}
_REDUCTIONS = {torch.mean, torch.amax, torch.sum, "mean", "amax", "sum"}
_SPATIAL = ({2, 3}, {-1, -2})


def is_binary(node: fx.Node) -> bool:
    """Return whether a call joins two operands elementwise."""
    return node.target in _BINARY


def binary(node: fx.Node) -> Callable[..., Any]:
    """Return the operation of such a call, never in place."""
    return _BINARY[node.target]


def is_size(node: fx.Node) -> bool:
    """Return whether a call reads a size, not values."""
    return node.target == "size" or (node.target is getattr and str(node.args[1]) == "shape")


def check_unary(node: fx.Node, state: State) -> None:
    """Check that a call treats each channel on its own.

    Raises:
        InputError: it does not, or is not known to; names it.
    """
    target = node.target
    if target in _ELEMENTWISE:
        return
    known = (
        target in _POOLS
        or (target in _REDUCTIONS and _is_spatial(node))
        or _flattens(node)
        or (target is operator.getitem and _keeps_channels(node.args[1]))
    )
    if known and state != "ragged":
        return
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    raise InputError(
        f"the branches call {name}{tuple(node.args[1:])} in {node.name}, which is not known to "
        "keep channels apart: expected elementwise functions, pools over pixels, flattening, or "
        "sums of two tensors"
    )


def _is_spatial(node: fx.Node) -> bool:
    dims = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    return isinstance(dims, list | tuple) and set(dims) in _SPATIAL


def _flattens(node: fx.Node) -> bool:
    if node.target in (torch.flatten, "flatten"):
        return tuple(node.args[1:]) == (1,) and not node.kwargs
    if node.target not in ("view", "reshape", torch.reshape):
        return False
    sizes = node.args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], list | tuple):
        sizes = tuple(sizes[0])
    # a literal number of channels would be that of one branch
    return len(sizes) == 2 and all(size == -1 or isinstance(size, fx.Node) for size in sizes)


def _keeps_channels(index: Any) -> bool:
    every = slice(None)
    return (
        isinstance(index, tuple)
        and index[:2] == (every, every)
        and all(part is None or part == every for part in index[2:])
    )


def spread(x: Tensor, groups: int) -> Tensor:
    """Repeat the channels: (N, C, ...) to (N, groups * C, ...)."""
    return x.repeat(1, groups, *[1] * (x.dim() - 2))


def join_shared(operation: str, a: Tensor, b: Tensor, groups: int, a_is_shared: bool) -> Tensor:
    """Join a tensor that all branches share with their own, without repeating it.

    Args:
        operation: 'add', 'sub' or 'mul'.
        a: (N, C, ...) if shared, else (N, groups * C, ...).
        b: the other kind.
        groups: number of branches.
        a_is_shared: which is which.
    """
    if a_is_shared:
        a, b = a.unsqueeze(1), b.unflatten(1, (groups, -1))
    else:
        a, b = a.unflatten(1, (groups, -1)), b.unsqueeze(1)
    return getattr(torch, operation)(a, b).flatten(1, 2)
