"""Transfer of batches from the loader to the device, which renders their images.

On a GPU, a stream beside the step's copies and renders one batch ahead. The process that runs the
step launches this work between two steps, so never during the capture of a CUDA graph.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tresnet.data.crops import Crops
from tresnet.models.tresnet import TResNet
from tresnet.ops.unit_floats import unit_floats
from tresnet.settings import Compute

Batch = tuple[Tensor, Tensor]
HostBatch = tuple[Tensor | Crops, Tensor]


class CopyStream:
    """CUDA stream that copies and renders batches on a GPU while the current stream computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._handed: torch.Event | None = None  # on the current stream

    def copy(self, batch: HostBatch) -> Batch:
        """Start to copy and render a batch; copies from pinned memory overlap with GPU work."""
        images, labels = batch
        with torch.cuda.stream(self._stream):
            if isinstance(images, Crops):
                images = images.render(self._device)
            images, labels = (x.to(self._device, non_blocking=True) for x in (images, labels))
        return images, labels

    def hand_over(self, batch: Batch) -> None:
        """Make the current stream wait for all work so far, so that it can use `batch`.

        The host waits until the GPU has finished the step before the last one. Otherwise it would
        render as many batches ahead, each in memory of its own, as it queues replays of a graph.
        """
        current = torch.cuda.current_stream(self._device)
        if self._handed is not None:
            self._handed.synchronize()
        current.wait_stream(self._stream)
        self._handed = current.record_event(torch.cuda.Event(blocking=True))
        for tensor in batch:
            # Without this call, the allocator could reuse the memory before `current` has read it.
            tensor.record_stream(current)


class Feed:
    """Transfer of batches to the device; uint8 images become floats unless the model reads uint8.

    Loaders yield `Crops`, of which the device renders uint8 images.
    """

    def __init__(
        self,
        compute: Compute,
        device: torch.device,
        *,
        keep_bytes: bool,
        dtype: torch.dtype = torch.float32,
        normalised_by: Mapping[str, Any] | None = None,
    ) -> None:
        """Store the settings; set `keep_bytes` for a model that reads uint8 (see `reads_bytes`).

        Without `keep_bytes`, uint8 images become floats of `dtype` in [0, 1] on the device. From
        them, and from other floats, the channels' `mean` of `normalised_by` is subtracted, and
        they are divided by its `std`, in float32. Means of 0 and deviations of 1 change nothing.
        """
        self._layout = compute.memory_format
        self._device = device
        self._keep_bytes = keep_bytes
        self._dtype = dtype
        self._largest = torch.tensor(255.0, device=device)
        self._statistics: list[Tensor] = []  # mean and deviation (C, 1, 1)
        if normalised_by is not None:
            mean, std = normalised_by["mean"], normalised_by["std"]
            if any(mean) or any(value != 1 for value in std):
                tensors = (torch.tensor(v, dtype=torch.float32, device=device) for v in (mean, std))
                self._statistics = [tensor.view(-1, 1, 1) for tensor in tensors]
                self._keep_bytes = False

    @functools.cached_property
    def _beside(self) -> CopyStream | None:
        # One for all epochs, because the allocator keeps free memory for each stream.
        return CopyStream(self._device) if self._device.type == "cuda" else None

    def ahead(self, batches: Iterable[HostBatch]) -> Iterator[Batch]:
        """Yield the result of `__call__` for each batch, while a GPU already renders the next one.

        If `batches` raises an error, all batches before the error are yielded first.
        """
        stream = self._beside
        if stream is None:
            yield from itertools.starmap(self, batches)
            return
        remaining, copied, failure = iter(batches), None, None
        while failure is None:
            batch = copied
            if batch is not None:  # before the next copy starts, so as not to wait for that copy
                stream.hand_over(batch)
            try:
                copied = stream.copy(next(remaining))
            except Exception as error:  # including StopIteration after the last batch
                failure = error
            if batch is not None:
                yield self(*batch)
        if not isinstance(failure, StopIteration):
            raise failure

    def __call__(self, images: Tensor | Crops, labels: Tensor) -> Batch:
        """Move images (N, 3, H, W) and labels (N,) or (N, classes) to the device.

        Images are `Crops`, uint8, or floats in [0, 1]. With `keep_bytes`, uint8 images keep dtype
        and memory format. All other images become floats in the memory format of `compute`.
        """
        return self.images(images), labels.to(self._device, non_blocking=True)

    def images(self, images: Tensor | Crops) -> Tensor:
        """Move images to the device and convert them as `__call__` does."""
        if isinstance(images, Crops):
            images = images.render(self._device)
        dtype = torch.float32 if self._statistics else self._dtype
        if images.dtype != torch.uint8:
            images = images.to(self._device, dtype, non_blocking=True, memory_format=self._layout)
        else:
            images = images.to(self._device, non_blocking=True)
            if self._keep_bytes:
                return images
            layout, largest = self._layout, self._largest
            images = unit_floats(images, dtype=dtype, memory_format=layout, largest=largest)
        if self._statistics:
            mean, std = self._statistics
            images = ((images - mean) / std).to(self._dtype)
        return images


def reads_bytes(model: nn.Module, compute: Compute) -> bool:
    """Return whether the model reads uint8 images; a TResNet's stem makes them channels last."""
    return compute.channels_last and isinstance(model, TResNet)
