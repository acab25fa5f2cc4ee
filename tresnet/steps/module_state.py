"""Check for changes of values that a CUDA graph holds as constants: a replay runs no Python code.

`ModuleState` reads the attributes of a module, and recursively all objects and containers in these
attributes. Changes of other values that methods read, such as global variables, go undetected.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import partial
from itertools import chain
from numbers import Number
from operator import attrgetter, getitem, is_, itemgetter
from types import BuiltinFunctionType, FunctionType, ModuleType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

# Functions and classes of these packages are assumed not to change.
_LIBRARIES = {"builtins", "torch", "timm", "torchvision", "tresnet"}
_CONSTANTS = (
    NoneType, Number, str, bytes, range, Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_ALL_HOOKS = {name for name in vars(nn.Module()) if "hook" in name}

_attributes = attrgetter("__dict__")
_hooks = itemgetter(
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
)
_tensor_hooks = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
needs_grad = attrgetter("requires_grad")


class _Empty:
    """Class whose instances only have a `__dict__`; larger instances may hold values elsewhere."""


class ModuleState:
    """Values that the code of a module or loss function can read, stored to detect changes.

    Contents of tensors are not stored, because a replay reads the tensors' memory. `parameters`
    lists each parameter once. `unreadable` names a value whose changes go undetected, or is None.
    """

    def __init__(self, root: object) -> None:
        """Read all values of `root`: a module, a function, a `functools.partial`, or None."""
        self.tensors: list[tuple[str, Tensor]] = []
        self.unreadable: str | None = None
        self._objects: list[Any] = []
        self._owners: list[Mapping[str, Any]] = []  # the `__dict__` that has each of `_keys`
        self._keys: list[str] = []
        self._dicts: list[dict[Any, Any]] = []
        self._sized: list[Any] = []
        self._collections: list[Any] = []  # which yield items of lists, keys of dictionaries, ...
        self._seen: dict[int, object] = {}  # by id, which is unique while the object is stored
        pending = [(type(root).__name__, root)]
        while pending:
            name, value = pending.pop()
            if id(value) not in self._seen and not is_constant(value):
                self._seen[id(value)] = value
                pending += self._record(name, value)
        self._modules = [value for value in self._objects if isinstance(value, nn.Module)]
        self.parameters = [tensor for _, tensor in self.tensors if isinstance(tensor, nn.Parameter)]
        self._identities, self._numbers = [*self._read_identities()], self._read_numbers()

    def _record(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Store a value, and yield the names and values of everything that the value contains."""
        if isinstance(value, type):
            if not _is_library(value.__module__):
                for key, part in self._record_attributes(name, value):
                    is_object = _is_plain(part) and not hasattr(type(part), "__get__")
                    is_value = is_object or isinstance(part, (type, Tensor, *_CONTAINERS))
                    if is_value and not key.rpartition(".")[2].startswith("__"):
                        yield key, part
                yield from ((name, base) for base in value.__bases__)
        elif isinstance(value, partial):
            yield from ((name, part) for part in (value.func, value.args, value.keywords))
        elif isinstance(value, FunctionType) and _is_library(value.__globals__["__name__"]):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            yield from ((name, x) for x in (value.__defaults__, value.__kwdefaults__, *cells))
        elif isinstance(value, BuiltinFunctionType):
            if not isinstance(value.__self__, NoneType | ModuleType | type):
                yield name, value.__self__
        elif isinstance(value, (Tensor, *_CONTAINERS)) or _is_plain(value):
            if hasattr(value, "__dict__"):
                self._objects.append(value)
                yield name, type(value)
                yield from self._record_attributes(name, value)
            if isinstance(value, Tensor):
                self.tensors.append((name, value))
            else:
                yield from self._record_items(name, value)
        else:
            self.unreadable = f"{name}, {value!r}"

    def _record_attributes(self, name: str, value: Any) -> list[tuple[str, Any]]:
        attributes = vars(value)
        keys = [key for key in attributes if key not in _ALL_HOOKS]  # `is_hooked` checks hooks
        self._sized.append(attributes)
        self._owners += [attributes] * len(keys)
        self._keys += keys
        return [(f"{name}.{key}", attributes[key]) for key in keys]

    def _record_items(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, _CONTAINERS):
            self._sized.append(value)
            self._collections.append(value)
            yield from ((f"{name}[{index}]", item) for index, item in enumerate(value))
        if isinstance(value, dict):
            self._dicts.append(value)
            yield from ((f"{name}[{key!r}]", item) for key, item in value.items())

    def _read_identities(self) -> Iterator[Any]:
        return chain(
            map(type, self._objects),
            map(_attributes, self._objects),
            map(getitem, self._owners, self._keys),
            chain.from_iterable(self._collections),
            chain.from_iterable(map(dict.values, self._dicts)),
        )

    def _read_numbers(self) -> list[int]:
        tensors = [tensor for _, tensor in self.tensors]
        return [*map(len, self._sized), *map(Tensor.data_ptr, tensors), *map(needs_grad, tensors)]

    def is_unchanged(self) -> bool:
        """Return whether all values are still the objects that `__init__` read."""
        try:
            return self._read_numbers() == self._numbers and all(
                map(is_, self._read_identities(), self._identities)
            )
        except KeyError:  # an attribute was deleted, and another was added
            return False

    def is_hooked(self) -> bool:
        """Return whether modules or parameters have hooks, which a replay would skip."""
        of_modules = chain.from_iterable(map(_hooks, map(_attributes, self._modules)))
        of_tensors = chain.from_iterable(map(_tensor_hooks, self.parameters))
        return bool(torch_module._has_any_global_hook()) or any(of_modules) or any(of_tensors)


def is_constant(value: object) -> bool:
    """Return whether `value` is a number, a string or another value that cannot change."""
    return isinstance(value, _CONSTANTS) and (
        isinstance(value, Enum) or not hasattr(value, "__dict__")
    )


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


def _is_plain(value: object) -> bool:
    """Return whether all values of an object are in its `__dict__`."""
    return hasattr(value, "__dict__") and type(value).__basicsize__ <= _Empty.__basicsize__
