"""Inference step, which runs a model in eval mode, in the chosen dtype and memory format."""

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from tresnet import devices
from tresnet.errors import InputError
from tresnet.fused import implementation
from tresnet.settings import Compute, InferenceCompute, torch_dtype
from tresnet.steps.capturer import CudaCapturer
from tresnet.steps.compiled import Say, compile_model, log
from tresnet.steps.feed import Feed, reads_bytes
from tresnet.steps.graph import GraphedStep, uses_graph
from tresnet.surgery.folding import fold

# Function that returns a context manager for a phase of a step; "forward" includes the loss.
# Memory predictions use these contexts to assign operations to phases.
During = Callable[[Literal["forward", "backward", "optimizer"]], AbstractContextManager[Any]]


class InferenceStep(GraphedStep):
    """Inference of a model: `feed` moves a batch to the device, and a call computes the logits.

    The attribute `model` is the argument `model`, or a copy with folded batch norms. `compute` has
    a decided precision.
    """

    def __init__(
        self,
        model: nn.Module,
        compute: Compute,
        device: torch.device,
        *,
        during: During | None = None,
        say: Say = log,
        normalised_by: Mapping[str, Any] | None = None,
    ) -> None:
        """Move the model to `device` and to the memory format of `compute`, in place.

        With a `Compute`, the model can be trained further. With its subclass `InferenceCompute`,
        weights must not change later, because the step may have converted, folded or frozen them.
        `say` is called with messages about compilation and CUDA graphs. With `normalised_by`, the
        model's `pretrained_cfg`, `feed` also subtracts its mean and divides by its deviation.
        `ConfigError`: CUDA graphs are requested but not possible. `InputError`: the model cannot be
        folded, or has complex weights, which cannot be converted.
        """
        self.compute = compute = compute.decided(devices.capability(device))
        self._device = device
        self._during = during or contextlib.nullcontext
        dtype, freeze = torch.float32, False
        if isinstance(compute, InferenceCompute):
            dtype, freeze = torch_dtype(compute.dtype), compute.freeze
            for name, value in chain(model.named_parameters(), model.named_buffers()):
                if value.is_complex():
                    raise InputError(
                        f"expected real numbers to convert to {dtype}, got {value.dtype} in "
                        f"{name}: run the model without tresnet's inference step"
                    )
            model = model.to(device, dtype).eval()
        self.model = move_model(model, compute, device)
        if isinstance(compute, InferenceCompute) and compute.fold:
            self.model = fold(self.model)
        keep_bytes = reads_bytes(self.model, compute)
        options = {"dtype": dtype, "normalised_by": normalised_by}
        self.feed = Feed(compute, device, keep_bytes=keep_bytes, **options)
        self._forward: Callable[[Tensor], Tensor] = self.model
        if compute.compile != "none":
            self._forward = compile_model(
                self.model, compute.compile, training=False, freeze=freeze, say=say
            )
        self._largest_batch = 0
        if isinstance(compute, InferenceCompute) and uses_graph(compute, device, during is None):
            self.capture_with(CudaCapturer(device), say)

    def __call__(self, images: Tensor) -> Tensor:
        """Return logits (N, classes) in float32 for images (N, 3, H, W) from `feed`."""
        if self.model.training:  # train.py evaluates a model between its training steps
            self.model.eval()
        count = len(images)
        if self.compute.compile != "none":
            images = self._padded(images)
        with torch.inference_mode(), self._during("forward"), self.compute.autocast(self._device):
            if self._graphs is None:
                logits = self._forward(images)
            else:
                (logits,) = self._graphs(lambda x: [self._forward(x)], [images])
            return logits.float()[:count]  # without the logits of the padding

    def _padded(self, images: Tensor) -> Tensor:
        """Pad a batch to the size of the largest batch so far, for which the model was compiled."""
        missing = self._largest_batch - len(images)
        if missing <= 0:
            self._largest_batch = len(images)
            return images
        return functional.pad(images, (0, 0, 0, 0, 0, 0, 0, missing))  # keeps the memory format


def move_model(model: nn.Module, compute: Compute, device: torch.device) -> nn.Module:
    """Move the model to the device and to the memory format of `compute`, in place."""
    model.to(device=device)
    return model.to(memory_format=compute.memory_format)  # pyright: ignore[reportCallIssue]


def describe_implementation(model: nn.Module, compute: Compute, device: torch.device) -> str:
    """Return what runs the model: fused kernels, plain PyTorch modules, or `torch.compile`."""
    if compute.compile != "none":
        return f"plain modules, by torch.compile in the mode {compute.compile}"
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    if compute.amp in ("bf16", "fp16"):
        dtype = torch_dtype(compute.amp)
    return implementation(model, device, dtype)
