"""Saved activations that backward rebuilds instead of keeping.

A convolution keeps its input for backward. Where that input is a cheap function of tensors that are
kept anyway (BN + activation of the previous convolution's output, a blur of that, an SE scale), the
function is cheaper to run again than its result is to store. Inside `scope()`, an operation may
`offer` its output together with the function that rebuilds it; whoever then saves that very tensor
for backward stores the function instead. One buffer per BN + activation remains: the output of the
convolution. The idea is in-place ABN's (arXiv 1712.02616, section 3) with the roles of the two
buffers exchanged: nothing is inverted, so any slope, any gamma (zero too) and any dtype give
exactly the gradients of plain batch normalisation.

Outside a scope offers are ignored and autograd keeps what it always keeps. Activation checkpointing
runs without one: its own hooks come first, and offers would hold on to what it lets go. Where a
user checkpoints a part of a model, `active()` is False in that part, as it is when the part runs
again in backward: what is saved must be the same.
"""

import atexit
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _autograd
from torch.multiprocessing.reductions import StorageWeakRef

from tresnet.ops.autocast import autocast_off

Rebuild = Callable[[], Tensor]


class _Offer(NamedTuple):
    """A tensor that can be rebuilt: its identity when it was offered, and how."""

    storage: StorageWeakRef
    version: int
    layout: tuple[Any, ...]
    rebuild: Rebuild


class _Kept(NamedTuple):
    """A tensor stored as autograd would store it, with the version autograd would check."""

    tensor: Tensor
    version: int


def _layout(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, x.shape, x.stride(), x.storage_offset()


class _Scope:
    """The offers made during one forward pass."""

    def __init__(self) -> None:
        self.offers: dict[int, _Offer] = {}
        self.hooks: Any = None  # as autograd has them

    def add(self, x: Tensor, rebuild: Rebuild) -> None:
        # The weak reference keeps the address of a dead storage from being used again.
        storage = StorageWeakRef(x.untyped_storage())
        self.offers[storage.cdata] = _Offer(storage, x._version, _layout(x), rebuild)

    def find(self, x: Tensor) -> Rebuild | None:
        offer = self.offers.get(x.untyped_storage()._cdata)
        if offer is None or offer.version != x._version or offer.layout != _layout(x):
            return None
        return offer.rebuild

    def pack(self, x: Tensor) -> Rebuild | _Kept:
        return self.find(x) or _Kept(x, x._version)


def _unpack(saved: Rebuild | _Kept) -> Tensor:
    if not isinstance(saved, _Kept):
        return saved()
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            "a tensor needed for backward was modified in place after the forward pass: "
            f"shape {tuple(saved.tensor.shape)}, version {saved.tensor._version}, "
            f"expected version {saved.version}; clone it before modifying it"
        )
    return saved.tensor


class _Active(threading.local):
    scope: _Scope | None = None


_active = _Active()


@functools.cache
def _flush_at_exit() -> None:
    """Let the engine drop what a failed backward left in its queue while Python still runs.

    After an exception in backward (out of memory, a tensor changed in place), torch keeps the nodes
    still to run until the process ends, and destroying their hooks after the interpreter's end
    crashes. Any later backward on the thread empties the queue.
    """
    atexit.register(lambda: torch.ones(1, requires_grad=True).sum().backward())


@contextmanager
def scope(active: bool = True) -> Iterator[None]:
    """Let the operations of a forward pass offer their outputs for recomputation.

    The scope concerns the current thread and ends with the forward pass; backward needs no scope.

    Args:
        active: False makes the scope do nothing.
    """
    if not active:
        yield
        return
    _flush_at_exit()
    outer, current = _active.scope, _Scope()
    _active.scope = current
    try:
        with torch.autograd.graph.saved_tensors_hooks(current.pack, _unpack):
            current.hooks = _hooks()
            yield
    finally:
        _active.scope = outer
        current.offers.clear()  # activation checkpointing may keep the hooks until backward


def _hooks() -> Any:
    """The pair of hooks, the innermost, that autograd calls for what is saved now."""
    return _autograd._top_saved_tensors_default_hooks(True)


def active() -> bool:
    """Whether offers are taken: within a scope, unless somebody else's hooks come first.

    An operation that asks saves something else where they are not.
    """
    return _active.scope is not None and _active.scope.hooks == _hooks()


def offer(
    y: Tensor, function: Callable[..., Tensor], *inputs: Tensor, always: bool = False
) -> None:
    """Offer `y`, which equals `function(*inputs)`, for recomputation.

    Each input is itself rebuilt if it was offered, and kept otherwise: offer only what is a
    function of tensors that are kept anyway or are small.

    Args:
        y: the output, unchanged since it was computed.
        function: rebuilds `y` from its inputs without randomness or side effects; called without
            gradient recording and outside autocast.
        inputs: the arguments of `function`.
        always: also where `y` needs no gradient, so that it is kept for a weight's alone.
    """
    current = None if torch.compiler.is_compiling() else _active.scope  # of a part of a model
    if current is None or not (y.requires_grad or always):
        return
    sources = [current.find(x) or _constant(x) for x in inputs]
    device_type = y.device.type

    def rebuild() -> Tensor:
        with torch.no_grad(), autocast_off(device_type):
            return function(*(source() for source in sources))

    current.add(y, rebuild)


def _constant(x: Tensor) -> Rebuild:
    kept = _Kept(x if x.grad_fn is None else x.detach(), x._version)
    return lambda: _unpack(kept)
