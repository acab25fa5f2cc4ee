"""Check for changes of what a CUDA graph holds as constants: a replay runs no Python code."""

from itertools import chain, repeat
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from tresnet.layers.hooks import hooks_of

_tensor_hooks = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_training = attrgetter("training")
needs_grad = attrgetter("requires_grad")


class ModuleState:
    """Facts about a module on which a replay of its operations depends, without tensors' contents.

    Stored are the module's parts and their modes, addresses of parameters and buffers, which of
    them require a gradient, and the attributes that the parts' `__constants__` name, such as a
    dropout's probability. Other attributes must not change. `parameters` lists each parameter once.
    """

    def __init__(self, root: object) -> None:
        """Read a module; another object, such as a function, is assumed not to change."""
        self._modules = list(root.modules()) if isinstance(root, nn.Module) else []
        self.parameters = list(root.parameters()) if isinstance(root, nn.Module) else []
        owned = [own for m in self._modules for own in (m._parameters, m._buffers, m._modules)]
        self._owned = [own for own in owned if own]
        self._empty = [own for own in owned if not own]
        self._hooks = list(chain.from_iterable(hooks_of(vars(module)) for module in self._modules))
        # While the parts are stored here, no other object can get the id of one.
        self._parts = self._read_parts()
        self._tensors = [part for part in self._parts if isinstance(part, Tensor)]
        constants = [(m, n) for m in self._modules for n in getattr(m, "__constants__", ())]
        self._owners, self._constants = zip(*constants, strict=True) if constants else ((), ())
        self.facts = self._read_facts()

    def _read_parts(self) -> list[Any]:
        return list(chain.from_iterable([own.values() for own in self._owned]))

    def _read_facts(self) -> tuple[Any, ...]:
        return (
            *map(id, self._read_parts()),
            *map(Tensor.data_ptr, self._tensors),
            *map(needs_grad, self._tensors),
            *map(_training, self._modules),
            *map(getattr, self._owners, self._constants, repeat(None)),
        )

    def is_unchanged(self) -> bool:
        """Return whether all values are still those that `__init__` read."""
        return not any(self._empty) and self._read_facts() == self.facts

    def is_hooked(self) -> bool:
        """Return whether modules or parameters have hooks, which a replay would skip."""
        of_tensors = chain.from_iterable(map(_tensor_hooks, self.parameters))
        return bool(torch_module._has_any_global_hook()) or any(self._hooks) or any(of_tensors)
