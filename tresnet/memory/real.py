"""A device that is there, for the same step that predictions run on fakes."""

import contextlib
from typing import Any

import torch
from torch import nn

from tresnet.errors import InputError
from tresnet.memory.events import Category, Phase
from tresnet.memory.plan import Plan


class RealMachine:
    """Runs steps on a device; implements `tresnet.memory.step.Machine`.

    Args:
        device: a CUDA device, or the CPU to check that everything runs.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)

    def place(self, model: nn.Module, plan: Plan) -> nn.Module:
        """Move `model` itself to the device.

        Raises:
            InputError: the plan asks for DDP, which needs processes of its own.
        """
        if plan.ddp:
            raise InputError("ddp is predicted but not measured: expected ddp=False")
        layout = torch.channels_last if plan.channels_last else torch.preserve_format
        return model.to(self.device, memory_format=layout)  # type: ignore[call-overload]

    def during(
        self, phase: Phase, category: Category | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Nothing to attribute: nobody records."""
        return contextlib.nullcontext()

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, channels_last: bool = False
    ) -> torch.Tensor:
        """Made on the CPU and copied, as a batch is."""
        layout = torch.channels_last if channels_last else torch.contiguous_format
        return torch.zeros(shape, dtype=dtype).to(self.device, memory_format=layout)

    def autocast(self, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
        """`torch.autocast`; None for none."""
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)

    def backward(self, loss: torch.Tensor) -> None:
        """Autograd's own."""
        loss.backward()

    def relabel(self, tensors: list[Any], category: Category) -> None:
        """Nothing to label: nobody records."""

    def start_step(self) -> None:
        """Nothing to mark: nobody records."""
