"""Move batches from the loader to the device, as bytes or as floats."""

import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from tresnet.models.tresnet import TResNet
from tresnet.ops.unit_floats import unit_floats
from tresnet.settings import Compute

Batch = tuple[Tensor, Tensor]


class CopyStream:
    """Copies batches to a GPU on a stream of its own, beside the work of the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, batch: Batch) -> Batch:
        """Begin to copy a batch; the copies overlap with other work if its memory is pinned."""
        with torch.cuda.stream(self._stream):
            images, labels = (x.to(self._device, non_blocking=True) for x in batch)
        return images, labels

    def hand_over(self, batch: Batch) -> None:
        """Let the current stream wait for all copies so far, and own the memory of `batch`."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in batch:
            # Otherwise the allocator could reuse the memory while the current stream reads it.
            tensor.record_stream(current)


class Feed:
    """Moves batches to the device, and turns bytes into floats if the model reads floats.

    Loaders give bytes, which take a quarter of the memory and transfer time of float32.
    """

    def __init__(
        self,
        compute: Compute,
        device: torch.device,
        *,
        keep_bytes: bool,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Store the settings; pass `keep_bytes` for a model that reads bytes (see `reads_bytes`).

        Without `keep_bytes`, `Feed` turns bytes into floats in [0, 1] of `dtype` on the device.
        """
        self._layout = compute.memory_format
        self._device = device
        self._keep_bytes = keep_bytes
        self._dtype = dtype
        self._largest = torch.tensor(255.0, device=device)

    def ahead(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield what `__call__` returns for each batch; a GPU copies the next batch meanwhile.

        If `batches` raises an error, the error is raised after the batch before it is yielded.
        """
        stream = copy_stream(self._device)
        if stream is None:
            yield from itertools.starmap(self, batches)
            return
        remaining, copied = iter(batches), None
        failure: Exception | None = None
        while failure is None:
            batch = copied
            if batch is not None:  # before the next copy begins, which nothing shall wait for
                stream.hand_over(batch)
            try:
                copied = stream.copy(next(remaining))
            except Exception as error:  # also StopIteration
                failure = error
            if batch is not None:
                yield self(*batch)
        if not isinstance(failure, StopIteration):
            raise failure

    def __call__(self, images: Tensor, labels: Tensor) -> Batch:
        """Move images (N, 3, H, W) and labels (N,) or (N, classes) to the device.

        Images are bytes or floats in [0, 1]. Images that stay bytes keep their memory format;
        floats get the memory format of `compute`.
        """
        return self.images(images), labels.to(self._device, non_blocking=True)

    def images(self, images: Tensor) -> Tensor:
        """Move only images, as `__call__` does."""
        if images.dtype != torch.uint8:
            return images.to(
                self._device, self._dtype, non_blocking=True, memory_format=self._layout
            )
        images = images.to(self._device, non_blocking=True)
        if self._keep_bytes:
            return images
        return unit_floats(
            images, dtype=self._dtype, memory_format=self._layout, largest=self._largest
        )


def copy_stream(device: torch.device) -> CopyStream | None:
    """Return the stream that copies batches to `device`, or None for a CPU."""
    return CopyStream(device) if device.type == "cuda" else None


def reads_bytes(model: nn.Module, compute: Compute) -> bool:
    """Return whether the model's stem reads bytes and turns them into channels-last floats."""
    return compute.channels_last and isinstance(model, TResNet)
