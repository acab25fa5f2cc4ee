"""Count the bytes of tensor storages: those alive after a forward pass, and the peak."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Births(TorchDispatchMode):
    """Mode that records the storages that operators allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._alive: dict[int, tuple[torch.Size, int]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self.live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(storage, self._dead, key)
        self._alive[key] = tensor.shape, size

    def _dead(self, key: int) -> None:
        self.live_bytes -= self._alive.pop(key)[1]

    def survivors(self, ignore: Any = ()) -> list[tuple[torch.Size, int]]:
        """Return shape and bytes of the living 4-D storages, except storages of `ignore`."""
        gc.collect()
        ignored = {t.untyped_storage()._cdata for t in ignore}
        return [
            (shape, size)
            for key, (shape, size) in self._alive.items()
            if key not in ignored and len(shape) == 4
        ]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return out


def live_after(function: Callable[[], Any], ignore: Any) -> list[tuple[torch.Size, int]]:
    """Return shape and bytes of the 4-D storages that `function` allocates and that outlive it.

    The function's output is alive during the count. Storages of tensors in `ignore` do not count.
    """
    with Births() as births:
        result = function()
    alive = births.survivors(ignore)
    del result
    return alive
