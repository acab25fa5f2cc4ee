"""Faster fakes: what an operation returned for arguments of the same form is remembered.

Faking one operation takes FakeTensorMode a third of a millisecond or more, even from its own
cache. Models repeat the same operation on the same shapes many times, and two steps are traced,
so results are remembered here by a much smaller key, for operations whose outputs are new
tensors or the very arguments. Views go straight to their meta kernels. Everything else, and
everything seen for the first time, goes through FakeTensorMode.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)

aten = torch.ops.aten

_VIEWS = {
    aten.detach.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.select.int,
    aten.slice.Tensor,
    aten.expand.default,
    aten.as_strided.default,
    aten.alias.default,
}
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout)


@dataclass(frozen=True, slots=True)
class _NewTensor:
    """A contiguous-in-memory output of its own storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class _Argument:
    """An output that is argument number `index`, changed in place."""

    index: int


_Output = _NewTensor | _Argument | None


class Unremembered(Exception):  # noqa: N818
    """These arguments or outputs have no small key."""


class ShapeMemory:
    """Runs operations on fakes, from memory where that is safe."""

    def __init__(self, mode: FakeTensorMode, *, enabled: bool = True) -> None:
        self._mode = mode
        self._enabled = enabled
        self._known: dict[tuple, tuple[bool, tuple[_Output, ...]] | None] = {}

    def run(self, func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """The result of `func`, as FakeTensorMode would give it."""
        if not self._enabled or self._mode.in_kernel_invocation:
            return func(*args, **kwargs)
        if func in _VIEWS and type(args[0]) is FakeTensor:
            return self._view(func, args, kwargs)
        try:
            key = (func, _key(args), _key(tuple(kwargs.items())))
        except Unremembered:
            return func(*args, **kwargs)
        if key in self._known:
            outputs = self._known[key]
            if outputs is None:
                return func(*args, **kwargs)
            return self._recall(outputs, args)
        result = func(*args, **kwargs)
        self._known[key] = _describe(result, args)
        return result

    def _view(self, func: Callable[..., Any], args: tuple, kwargs: dict) -> FakeTensor:
        base = args[0]
        with in_kernel_invocation_manager(self._mode):
            meta = func(*args, **kwargs)
        return FakeTensor(self._mode, meta, base.fake_device)

    def _recall(
        self, remembered: tuple[bool, tuple[_Output, ...]], args: tuple
    ) -> torch.Tensor | tuple | None:
        single, outputs = remembered
        if single:
            return self._make(outputs[0], args)
        return tuple(self._make(output, args) for output in outputs)

    def _make(self, output: _Output, args: tuple) -> torch.Tensor | None:
        if output is None:
            return None
        if isinstance(output, _Argument):
            return args[output.index]
        with in_kernel_invocation_manager(self._mode):
            meta = torch.empty_strided(
                output.shape, output.stride, dtype=output.dtype, device="meta"
            )
        return FakeTensor(self._mode, meta, output.device)


def _key(value: Any) -> Any:
    """A hashable form of arguments: tensors by shape, strides, dtype, device.

    Raises:
        Unremembered: a real tensor, a fake with a known value, or something unusual.
    """
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None:
            raise Unremembered
        return (
            value.shape,
            value.stride(),
            value.dtype,
            value.fake_device,
            value.storage_offset(),
        )
    if kind is tuple or kind is list:
        return tuple(map(_key, value))
    if kind in _PLAIN or value is None or isinstance(value, torch.memory_format):
        return kind, value
    raise Unremembered


def _describe(result: Any, args: tuple) -> tuple[bool, tuple[_Output, ...]] | None:
    """The form of a result; None if it must not be remembered."""
    single = not isinstance(result, tuple)
    outputs = (result,) if single else result
    arguments = [a for a in _flat(args) if isinstance(a, torch.Tensor)]
    storages = {a.untyped_storage()._cdata for a in arguments}
    described = []
    for output in outputs:
        form = _describe_one(output, args, storages)
        if form is NotImplemented:
            return None
        described.append(form)
        if isinstance(form, _NewTensor):
            storages.add(output.untyped_storage()._cdata)
    return single, tuple(described)


def _describe_one(output: Any, args: tuple, storages: set[int]) -> Any:
    """The form of one output; NotImplemented if it is none of those that can be made again."""
    if output is None:
        return None
    if type(output) is not FakeTensor or output.constant is not None:
        return NotImplemented
    for index, argument in enumerate(args):
        if output is argument:
            return _Argument(index)
    if output.untyped_storage()._cdata in storages or output.storage_offset() != 0:
        return NotImplemented
    shape, stride = tuple(output.shape), output.stride()
    if output.untyped_storage().nbytes() != _span_bytes(shape, stride, output.element_size()):
        return NotImplemented
    return _NewTensor(shape, stride, output.dtype, output.fake_device)


def _span_bytes(shape: tuple[int, ...], stride: tuple[int, ...], item_bytes: int) -> int:
    if 0 in shape:
        return 0
    span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    return span * item_bytes


def _flat(value: Any) -> Any:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _flat(item)
    else:
        yield value
