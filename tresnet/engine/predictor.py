"""A model in evaluation mode on its device, in the configured precision and layout."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tresnet.engine.config import ComputeConfig
from tresnet.engine.feed import Feed, memory_format, reads_bytes
from tresnet.models.compiled import compile_model

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Predictor:
    """Moves batches to the device and gives a model's logits for them."""

    def __init__(
        self,
        model: nn.Module,
        compute: ComputeConfig,
        device: torch.device,
        say: Callable[[str], object] | None = None,
    ) -> None:
        """Move the model to its device and layout.

        Args:
            model: The model, which may go on being trained.
            compute: Precision, layout, and whether to compile.
            device: Where to compute.
            say: Told how long compiling took; None for the log.
        """
        self._model = place(model, compute, device)
        self._compute = compute
        self._device = device
        self._feed = Feed(compute, device, keep_bytes=reads_bytes(model, compute))
        self._forward = compiled(self._model, compute, False, say)
        self._images = 0  # of the largest batch yet

    def to_device(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """A loader's batch on the device, as `predict` wants it."""
        return self._feed(images, labels)

    def predict(self, images: Tensor) -> Tensor:
        """Logits (N, classes) in float32 of images (N, 3, H, W) from `to_device`."""
        self._model.eval()
        count = len(images)
        if self._compute.compile:
            images = self._filled_up(images)
        with torch.inference_mode(), autocast(self._compute, self._device):
            return self._forward(images).float()[:count]

    def _filled_up(self, images: Tensor) -> Tensor:
        """The last batch as large as the others: for another size the model is compiled again."""
        missing = self._images - len(images)
        if missing <= 0:
            self._images = len(images)
            return images
        return functional.pad(images, (0, 0, 0, 0, 0, 0, 0, missing))  # keeps the layout


def place(model: nn.Module, compute: ComputeConfig, device: torch.device) -> nn.Module:
    """The model itself, moved to the device and to the configured layout."""
    return model.to(device=device).to(memory_format=memory_format(compute))  # pyright: ignore[reportCallIssue]


def autocast(
    compute: ComputeConfig, device: torch.device
) -> contextlib.AbstractContextManager[object]:
    """Autocast to the configured 16-bit type, or nothing."""
    if compute.amp == "off":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[compute.amp])


def compiled(
    model: nn.Module,
    compute: ComputeConfig,
    training: bool,
    say: Callable[[str], object] | None = None,
) -> Callable[[Tensor], Tensor]:
    """The model as a function, compiled if so configured; `say` is told how long that took."""
    return compile_model(model, training=training, say=say) if compute.compile else model
