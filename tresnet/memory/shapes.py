"""Speed up fake tensors (tensors without data) by a cache of the results of operations.

FakeTensorMode needs a third of a millisecond or more for one operation, even with its own cache.
The cache in this module is faster, because its key has little more than shapes, strides, dtypes and
devices. Layers often repeat an operation on equal shapes, and the second step repeats the first.
A result is cached if each of its items is a new tensor, an argument or None.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

_VIEWS = {
    aten.detach.default, aten.view.default, aten._unsafe_view.default, aten.t.default,
    aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.select.int, aten.slice.Tensor,
    aten.expand.default, aten.as_strided.default, aten.alias.default,
}  # fmt: skip
_PLAIN = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class _UncachableError(Exception):
    """The arguments of an operation cannot be a key of the cache."""


class ShapeMemory:
    """Runs operations on fake tensors, and caches their results where possible."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        # A key is an operation with its arguments. A value is None if the result cannot be cached.
        # Otherwise, it is a pair: whether the result is a tuple, and a list of the outputs. An
        # output is None, an argument's index, or (shape, strides, dtype, device).
        self._results: dict[tuple, tuple[bool, list[Any]] | None] = {}

    def run(self, func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Return the result that FakeTensorMode would compute for `func`."""
        if self._mode.in_kernel_invocation:
            return func(*args, **kwargs)
        if func in _VIEWS and type(args[0]) is FakeTensor:
            with in_kernel_invocation_manager(self._mode):
                meta = func(*args, **kwargs)
            return FakeTensor(self._mode, meta, args[0].fake_device)
        try:
            key = (func, _key(args), _key(tuple(kwargs.items())))
        except _UncachableError:
            return func(*args, **kwargs)
        if key not in self._results:
            result = func(*args, **kwargs)
            self._results[key] = _describe(result, args)
            return result
        cached = self._results[key]
        if cached is None:
            return func(*args, **kwargs)
        several, outputs = cached
        results = [self._make(output, args) for output in outputs]
        return tuple(results) if several else results[0]

    def _make(self, output: Any, args: tuple) -> torch.Tensor | None:
        if output is None or isinstance(output, int):
            return None if output is None else args[output]
        shape, stride, dtype, device = output
        with in_kernel_invocation_manager(self._mode):
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return FakeTensor(self._mode, meta, device)


def _key(value: Any) -> Any:
    """Return a hashable key of an argument; an argument without one raises `_UncachableError`."""
    kind = type(value)
    if kind is FakeTensor and value.constant is None:
        form = value.shape, value.stride(), value.dtype, value.fake_device
        return *form, value.storage_offset()
    if kind is tuple or kind is list:
        return tuple(map(_key, value))
    if value is None or kind in _PLAIN:
        return kind, value
    raise _UncachableError


def _describe(result: Any, args: tuple) -> tuple[bool, list[Any]] | None:
    several = isinstance(result, tuple)
    storages = {
        t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, torch.Tensor)
    }
    outputs: list[Any] = []
    for output in result if several else (result,):
        argument = next((i for i, a in enumerate(args) if output is a), None)
        if output is None or argument is not None:
            outputs.append(argument)
            continue
        if type(output) is not FakeTensor or output.constant is not None:
            return None
        storage, shape, stride = output.untyped_storage(), tuple(output.shape), output.stride()
        span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        n_bytes = 0 if 0 in shape else span * output.element_size()
        if storage._cdata in storages or output.storage_offset() or storage.nbytes() != n_bytes:
            return None
        storages.add(storage._cdata)
        outputs.append((shape, stride, output.dtype, output.fake_device))
    return several, outputs
