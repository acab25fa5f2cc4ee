"""How functions and methods inside a branch carry over to the merged module."""

import operator
from collections.abc import Callable, Mapping
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
    **dict.fromkeys((operator.truediv, operator.itruediv, torch.div, "div", "div_"), torch.div),
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


def check_sizes(node: fx.Node, states: Mapping[fx.Node, State | None]) -> None:
    """Check that a call uses no number of channels, which would be that of all branches.

    The last dimensions are rows and columns where a pool takes them; elsewhere they may be channels.

    Args:
        node: the call.
        states: what the values before it hold, None for sizes and what is computed from them.

    Raises:
        InputError: it does.
    """
    sizes = [other for other in node.all_input_nodes if states[other] is None]
    if _flattens(node):  # to the channels of a tensor that grows like the one that is flattened
        wanted = states[node.all_input_nodes[0]]
        sizes = [n for n in sizes if _dimension(n) == 1 and states[_measured(n)] != wanted]
    spatial = (2, 3, -1, -2) if node.target in _POOLS else (2, 3)
    if any(_counts_channels(size, spatial) for size in sizes):
        raise InputError(
            f"the branches use a number of channels in {node.name}, which would be that of all "
            "branches: expected literal numbers, or sizes of dimensions 0, 2 and 3"
        )


def _counts_channels(size: fx.Node, spatial: tuple[int, ...]) -> bool:
    dim = _dimension(size)
    if isinstance(dim, slice):
        return dim not in (slice(2, None), slice(-2, None))
    if dim is not None:
        return dim not in (0, *spatial)
    return is_size(size) or any(_counts_channels(n, spatial) for n in size.all_input_nodes)


def _dimension(size: fx.Node) -> Any:
    """Return which dimensions of a tensor are read, None for all of them or for what is no size."""
    if size.target == "size":
        return size.args[1] if len(size.args) > 1 else size.kwargs.get("dim")
    if size.target is operator.getitem and is_size(_node(size.args[0])):
        return size.args[1]
    return None


def _measured(size: fx.Node) -> Any:
    """Return the tensor whose size is read."""
    while is_size(size) or size.target is operator.getitem:
        size = _node(size.args[0])
    return size


def _node(argument: Any) -> fx.Node:
    assert isinstance(argument, fx.Node), argument
    return argument


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
        start = node.args[1:] or tuple(node.kwargs.values())
        return start == (1,) and set(node.kwargs) <= {"start_dim"}
    if node.target not in ("view", "reshape", torch.reshape):
        return False
    sizes = node.args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], list | tuple):
        sizes = tuple(sizes[0])
    if len(sizes) != 2:
        return False
    # a literal number of channels would be that of one branch
    return all(
        size == -1 or (isinstance(size, fx.Node) and _dimension(size) == dim)
        for dim, size in enumerate(sizes)
    )


def _keeps_channels(index: Any) -> bool:
    every = slice(None)
    return (
        isinstance(index, tuple)
        and index[:2] == (every, every)
        and all(part is None or part == every for part in index[2:])
    )


def spread(x: Tensor, groups: int) -> Tensor:
    """Repeat the channels: (N, C, ...) to (N, groups * C, ...)."""
    return torch.cat([x] * groups, dim=1)


def join(
    operation: str, a: Tensor, b: Tensor, groups: int, a_is_shared: bool, b_is_shared: bool
) -> Tensor:
    """Join two tensors elementwise as each branch does, without repeating what branches share.

    Plain enough for TorchScript, and without conditions on tensors: a merged module is traced again
    when it is unpickled.

    Args:
        operation: 'add', 'sub', 'mul' or 'div'.
        a: (N, C, ...) if shared, else (N, groups * C, ...); C may be 1 in one of the two.
        b: likewise.
        groups: number of branches.
        a_is_shared: whether all branches have the same `a`.
        b_is_shared: whether all branches have the same `b`.
    """
    a = a.unsqueeze(1) if a_is_shared else a.unflatten(1, [groups, -1])
    b = b.unsqueeze(1) if b_is_shared else b.unflatten(1, [groups, -1])
    if operation == "add":
        y = a + b
    elif operation == "sub":
        y = a - b
    else:
        y = a * b if operation == "mul" else a / b
    return y.flatten(1, 2)
