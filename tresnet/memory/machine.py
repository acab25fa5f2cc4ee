"""The fake GPU: fake tensors, a recorder, boxed saved tensors and the backward walk together."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tresnet.memory.buckets import Buckets
from tresnet.memory.device import Device
from tresnet.memory.events import Category, Phase, Trace
from tresnet.memory.fake import (
    fake_autocast,
    fake_copy,
    fake_cuda,
    fake_device,
    follow_modules,
    in_order_of_to,
)
from tresnet.memory.plan import Plan
from tresnet.memory.recorder import Recorder
from tresnet.memory.saved import SavedTensors
from tresnet.memory.shapes import ShapeMemory
from tresnet.memory.walk import BackwardWalk, remember_materialize_grads
from tresnet.memory.workspaces import Workspaces


class FakeMachine:
    """Runs steps on fakes and records them; implements `tresnet.memory.step.Machine`.

    Args:
        device: the GPU it stands for.
        workspaces: what kernels borrow.
        real_engine: run backward with the autograd engine, which only works for fakes of CPU
            tensors; the tests compare the walk with it.
        remember_shapes: False fakes every operation anew; the tests compare.
        device_type: `cuda` or `cpu`; None for what this build of torch can fake.
    """

    def __init__(
        self,
        device: Device,
        workspaces: Workspaces,
        *,
        real_engine: bool = False,
        device_type: str | None = None,
        remember_shapes: bool = True,
    ) -> None:
        self.device = torch.device(device_type) if device_type else fake_device()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        shapes = ShapeMemory(self.mode, enabled=remember_shapes)
        self.recorder = Recorder(self.device.type, device, workspaces, shapes)
        self._saved = SavedTensors()
        self._real_engine = real_engine
        self._buckets: Buckets | None = None
        self._walk = BackwardWalk(
            self._saved,
            sum_in_place=self.device.type == "cuda",
            before_node=self.recorder.enter_node,
            on_gradient=self._gradient_arrived,
        )

    @property
    def trace(self) -> Trace:
        """What has been recorded so far."""
        return self.recorder.trace

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The surroundings in which models are placed and steps run."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(fake_cuda(self.mode))
            stack.enter_context(self.recorder)
            if not self._real_engine:
                stack.enter_context(self._saved.recording())
                stack.enter_context(remember_materialize_grads())
                stack.enter_context(self._walk_for_autograd())
            yield

    def copy(self, model: nn.Module, plan: Plan) -> nn.Module:
        """A copy of `model` without data, not yet on the device; call it outside `running()`."""
        return fake_copy(model, self.mode, self.device, channels_last=plan.channels_last)

    def place(self, copied: nn.Module, plan: Plan) -> None:
        """Put a copy on the device, as `model.to(device)` and DDP would."""
        names = {id(p): name.rpartition(".")[0] for name, p in copied.named_parameters()}
        with self.during(Phase.SETUP):
            for tensor, is_parameter in in_order_of_to(copied):
                category = Category.PARAMETERS if is_parameter else Category.BUFFERS
                self.recorder.see(tensor, category, names.get(id(tensor), ""))
            if plan.train and plan.ddp:
                self._buckets = Buckets(copied, plan)
                with self.during(Phase.SETUP, Category.BUCKETS):
                    self._buckets.allocate()
        self.recorder.mark_masters(copied.parameters())
        follow_modules(copied, self.recorder.enter_module, self.recorder.leave_module)

    # -- tresnet.memory.step.Machine ----------------------------------------------------------

    def during(
        self, phase: Phase, category: Category | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Attribute what happens inside to a phase, and new buffers to a category."""
        return self.recorder.during(phase, category)

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, channels_last: bool = False
    ) -> torch.Tensor:
        """A fake tensor on the device."""
        layout = torch.channels_last if channels_last else torch.contiguous_format
        return torch.empty(shape, dtype=dtype, device=self.device, memory_format=layout)

    def autocast(self, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[None]:
        """Autocast to `dtype`; None for none."""
        return fake_autocast(self.device.type, dtype)

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward and let go of all that was saved for it."""
        if self._real_engine:
            loss.backward()
            return
        self._walk.backward(loss)
        self._walk.finish()
        self.recorder.leave_backward()

    def relabel(self, tensors: list[Any], category: Category) -> None:
        """Say what tensors turned out to be for."""
        self.recorder.relabel(tensors, category)

    def start_step(self) -> None:
        """Mark where a step begins; DDP lays its buckets out again before the second."""
        self.recorder.start_step()
        if self._buckets is not None and self.recorder.step == 2:
            with self.during(Phase.SETUP, Category.BUCKETS):
                self._buckets.rebuild()

    # -----------------------------------------------------------------------------------------

    def _gradient_arrived(self, parameter: torch.Tensor) -> None:
        if self._buckets is not None:
            self._buckets.gradient_arrived(parameter)
        self.recorder.relabel([parameter.grad], Category.GRADIENTS)

    @contextlib.contextmanager
    def _walk_for_autograd(self) -> Iterator[None]:
        """Reentrant checkpointing calls `torch.autograd.backward` from inside a node."""
        real = torch.autograd.backward
        torch.autograd.backward = self._walk.backward  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.autograd.backward = real
