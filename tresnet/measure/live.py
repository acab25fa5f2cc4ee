"""Peak bytes of live tensors during a piece of work, on any device and without computing it.

Every operator's outputs are seen as they are made, and their storages as they die. That counts what
PyTorch's tensors hold: no workspaces, no allocator's rounding. Under `without_computing` nothing is
allocated, so a ResNet50's training step at batch 16 is measured in seconds on a CPU.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tresnet.measure.macs import without_computing


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

    def add(self, tensor: Tensor) -> None:
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
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return out


def training_peak(build: Any, input_shape: tuple[int, ...]) -> int:
    """Return the peak bytes of one forward and backward pass, without computing it.

    Parameters, buffers, the input, activations and gradients count; optimizer state does not.

    Args:
        build: makes the model, on the default device.
        input_shape: (N, C, H, W), float32.
    """
    with without_computing():
        model: nn.Module = build()
        model.train()
        x = torch.empty(input_shape)
        peak = LivePeak()
        with peak:
            for tensor in (*model.parameters(), *model.buffers(), x):
                peak.add(tensor)
            model(x).sum().backward()
        return peak.peak_bytes
