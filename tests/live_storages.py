"""Counts the bytes of storages: alive after a forward pass, or alive at once."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Births(TorchDispatchMode):
    """Notes every storage made within it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, torch.Size, int]] = {}

    def alive(self) -> int:
        """Bytes of the 4-D storages made so far that are still alive."""
        gc.collect()
        return sum(
            size for ref, shape, size in self.seen.values() if not ref.expired() and len(shape) == 4
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                ref = StorageWeakRef(storage)
                self.seen[storage._cdata] = (ref, t.shape, storage.nbytes())
        return out


def live_after(function: Callable[[], Any], ignore: Any) -> list[tuple[torch.Size, int]]:
    """Return shape and bytes of every 4-D storage made by `function` and still alive after it.

    Args:
        function: runs a forward pass and returns its output, which is held while counting.
        ignore: tensors (parameters, inputs) whose storages do not count.
    """
    known = {t.untyped_storage()._cdata for t in tree_leaves(list(ignore))}
    with Births() as births:
        result = function()
    gc.collect()
    alive = [
        (shape, size)
        for key, (ref, shape, size) in births.seen.items()
        if not ref.expired() and key not in known and len(shape) == 4
    ]
    del result
    return alive


class LivePeak(TorchDispatchMode):
    """Counts the storages that operators make while it is active.

    Attributes:
        live_bytes: alive now.
        peak_bytes: the most that was alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: set[int] = set()

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor that was there before."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._dead, key, size)

    def _dead(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live_bytes -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count what it made."""
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return out
