"""The step itself, written once for the fake machine and for a real one.

The loop is the usual one, and the one of the document that the predictor is checked against: the
old batch is dropped before the new one is made, gradients are cleared before forward, output and
loss of the last step live on until they are replaced.
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tresnet.errors import InputError
from tresnet.memory.events import Category, Phase
from tresnet.memory.plan import Plan


class Machine(Protocol):
    """Where a step runs: a fake GPU that records, or a device that is there."""

    def during(
        self, phase: Phase, category: Category | None = None
    ) -> AbstractContextManager[None]:
        """Attribute what happens inside."""
        ...

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, channels_last: bool = False
    ) -> torch.Tensor:
        """A tensor on the device, its values of no matter."""
        ...

    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        """Autocast to `dtype`; None for none."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate gradients into the parameters."""
        ...

    def relabel(self, tensors: list[Any], category: Category) -> None:
        """Say what tensors turned out to be for."""
        ...

    def start_step(self) -> None:
        """Mark where a step begins."""
        ...


class Training:
    """A model in training: `step()` runs one, `output` and `loss` are those of the last."""

    def __init__(self, model: nn.Module, plan: Plan, machine: Machine) -> None:
        self.model, self.plan, self.machine = model, plan, machine
        model.train()
        apply_checkpointing(model, plan.checkpointing)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise InputError(
                "expected a model with parameters to train, got none that requires a gradient: "
                "predict with train=False"
            )
        self.optimizer = plan.optimizer(self.parameters)
        self.ema = self._copy_for_ema() if plan.ema else []
        self.x = self.y = self.output = self.loss = None
        self.loss_scale = self._loss_scale()

    def step(self) -> None:
        """Batch, zero_grad, forward, loss, backward, optimizer; batches are accumulated first."""
        plan, machine = self.plan, self.machine
        machine.start_step()
        for micro_step in range(plan.accumulation_steps):
            self.x = self.y = None
            self.x, self.y = make_batch(plan, machine)
            if micro_step == 0:
                self.optimizer.zero_grad(set_to_none=plan.zero_grad_to_none)
            with machine.during(Phase.FORWARD), machine.autocast(plan.amp):
                self.output = self.model(self.x)
                self.loss = plan.loss(self.output, self.y)
            with machine.during(Phase.BACKWARD):
                machine.backward(self._scaled(self.loss))
        with machine.during(Phase.OPTIMIZER):
            self.optimizer.step()
            state = tree_leaves(list(self.optimizer.state.values()))
            machine.relabel(state, Category.OPTIMIZER)
            self._update_ema()

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.loss_scale is None else loss * self.loss_scale

    def _loss_scale(self) -> torch.Tensor | None:
        """A GradScaler's scale, which fp16 needs; its other tensors are a few bytes."""
        if self.plan.amp is not torch.float16:
            return None
        with self.machine.during(Phase.SETUP, Category.OPTIMIZER):
            return self.machine.empty((), torch.float32)

    def _copy_for_ema(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        with self.machine.during(Phase.SETUP, Category.EMA), torch.no_grad():
            state = [*self.model.parameters(), *self.model.buffers()]
            return [(t.detach().clone(), t) for t in state]

    def _update_ema(self) -> None:
        floats = [pair for pair in self.ema if pair[0].is_floating_point()]
        if not floats:
            return
        with torch.no_grad():
            torch._foreach_lerp_([e for e, _ in floats], [t for _, t in floats], 0.001)


class Inference:
    """A model in inference: `step()` runs one batch, `output` is the last one's."""

    def __init__(self, model: nn.Module, plan: Plan, machine: Machine) -> None:
        self.model, self.plan, self.machine = model, plan, machine
        model.eval()
        self.x = self.output = None

    def step(self) -> None:
        """One batch, without gradients."""
        machine = self.machine
        machine.start_step()
        self.x = None
        with machine.during(Phase.INPUT):
            self.x = _image(self.plan, machine)
        with machine.during(Phase.FORWARD), machine.autocast(self.plan.amp), torch.no_grad():
            self.output = self.model(self.x)


def start(model: nn.Module, plan: Plan, machine: Machine) -> Training | Inference:
    """Training or inference, as the plan says."""
    return (Training if plan.train else Inference)(model, plan, machine)


def make_batch(plan: Plan, machine: Machine) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (N, C, H, W), and one class index or a float target each."""
    with machine.during(Phase.INPUT):
        x = _image(plan, machine)
        if plan.target_size is None:
            return x, machine.empty((plan.batch_size,), torch.int64)
        return x, machine.empty((plan.batch_size, *plan.target_size), torch.float32)


def _image(plan: Plan, machine: Machine) -> torch.Tensor:
    return machine.empty(plan.input_shape, plan.input_dtype, channels_last=plan.channels_last)


def apply_checkpointing(model: nn.Module, what: bool | tuple[str, ...]) -> None:
    """Recompute activations: the model's own choice for True, or the named submodules.

    Raises:
        InputError: the model offers no choice of its own, or has no such submodule.
    """
    if what is True:
        enable = getattr(model, "set_grad_checkpointing", None)
        if enable is None:
            raise InputError(
                f"{type(model).__name__} has no set_grad_checkpointing: name the submodules to "
                "recompute, for example checkpointing=['layer1', 'layer2']"
            )
        enable(True)
    elif what:
        for name in what:
            _checkpoint_one(model, name)


def _checkpoint_one(model: nn.Module, name: str) -> None:
    try:
        module = model.get_submodule(name)
    except AttributeError as error:
        names = ", ".join(child for child, _ in model.named_children())
        raise InputError(
            f"expected the name of a submodule to recompute ({names}, or deeper), got {name!r}"
        ) from error
    forward = module.forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    module.forward = recomputed
