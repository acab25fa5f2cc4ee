"""Counts the bytes that stay alive after a forward pass, without autograd's bookkeeping."""

import gc
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
