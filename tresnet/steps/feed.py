"""Move batches from the loader to the device, as bytes or as floats."""

import torch
from torch import Tensor, nn

from tresnet.models.tresnet import TResNet
from tresnet.ops.unit_floats import unit_floats
from tresnet.settings import Compute


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

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
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


def reads_bytes(model: nn.Module, compute: Compute) -> bool:
    """Return whether the model's stem reads bytes and turns them into channels-last floats."""
    return compute.channels_last and isinstance(model, TResNet)
