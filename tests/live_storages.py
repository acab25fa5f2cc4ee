"""Counts the bytes of storages: alive after a forward pass, or the most that are alive at once."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Births(TorchDispatchMode):
    """Records the storages that operators make while it is active."""

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
        """Shape and bytes of the 4-D storages that are still alive, but those of `ignore`."""
        gc.collect()
        known = {t.untyped_storage()._cdata for t in ignore}
        return [
            (shape, size)
            for key, (shape, size) in self._alive.items()
            if key not in known and len(shape) == 4
        ]

    def alive(self) -> int:
        """Bytes of the 4-D storages made so far that are still alive."""
        return sum(size for _, size in self.survivors())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return out


def live_after(function: Callable[[], Any], ignore: Any) -> list[tuple[torch.Size, int]]:
    """Shape and bytes of the 4-D storages that `function` made and that outlive it.

    Its output is held while they are counted. Storages of tensors in `ignore` do not count.
    """
    with Births() as births:
        result = function()
    alive = births.survivors(ignore)
    del result
    return alive
