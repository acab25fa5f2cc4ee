"""Prediction of the memory of a training step or an inference, before it runs, without a GPU.

`record` runs two steps of `tresnet.steps` on fake tensors (tensors without data) and returns a
trace of their memory. `predict` replays the trace on a simulated allocator.
"""

import contextlib
import gc
import logging
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses import fake_tensor as fakes
from torch.utils._pytree import tree_map_only

from tresnet.errors import InputError, TResNetError
from tresnet.memory.device import MIB, Device
from tresnet.memory.machine import FakeMachine, fake_copy
from tresnet.memory.plan import MemoryPlan, ModelLike, default_loss, make_plan, plan_of
from tresnet.memory.replay import Replay, breakdown, free_bytes, replay
from tresnet.memory.trace import Category, Operation, Phase, Trace
from tresnet.steps import InferenceStep, StepHost, TrainingStep
from tresnet.steps.flat_gradients import FlatGradients

# Predictions patch torch's globals, so only one thread may predict at a time.
_LOCK = threading.RLock()

# The first step creates gradients and optimizer state. The second step has the same peak as all
# later steps.
STEPS = 2

# Upper bound of reserved bytes, as a multiple of the simulated bytes. On a real GPU, workspaces and
# the order of backward fragment the cache.
_RESERVED_RATIO = 1.10

# Assumed relative error of allocated bytes apart from workspaces. Predictions for a published
# notebook differ from its measurements by at most 0.5 %, except for VGG16, which needs workspaces.
RELATIVE_ERROR = 0.01
# Larger errors apply if torch was built without CUDA, because the step then runs on fake CPU
# tensors. On a CPU, autocast saves other tensors for backward than on CUDA.
_RELATIVE_ERROR_CPU_FP32 = 0.02
_RELATIVE_ERROR_CPU_AMP = 0.10


class Estimate(NamedTuple):
    """Predicted number of bytes, with a lower and an upper bound."""

    expected_bytes: int
    low_bytes: int
    high_bytes: int

    @property
    def mib(self) -> float:
        return self.expected_bytes / MIB

    def to_dict(self) -> dict[str, float]:
        low_mib, high_mib = self.low_bytes / MIB, self.high_bytes / MIB
        return {"mib": self.mib, "low_mib": low_mib, "high_mib": high_mib}

    def __str__(self) -> str:
        return f"{self.mib:.1f} MiB ({self.low_bytes / MIB:.0f} to {self.high_bytes / MIB:.0f})"


@dataclass(frozen=True)
class MemoryPrediction:
    """Predicted memory of one step.

    `allocated` is the peak of the tensors (`torch.cuda.max_memory_allocated`). `reserved` is the
    peak of the caching allocator's segments (`max_memory_reserved`). `device_total` is `reserved`
    plus the CUDA context; NVML reports this sum. `end_allocated_bytes` remain after the last step.

    `peak_operation` is the operation during which `allocated` has its peak. The bytes in
    `by_category` add up to `allocated.expected_bytes`. `out_of_memory` is the first operation that
    did not fit, or None.
    """

    model: str
    plan: MemoryPlan
    device: Device
    allocated: Estimate
    reserved: Estimate
    device_total: Estimate
    end_allocated_bytes: int
    by_category: dict[Category, int]
    peak_operation: Operation | None
    out_of_memory: Operation | None
    notes: tuple[str, ...]
    seconds: float
    trace: Trace
    replay: Replay

    def __str__(self) -> str:
        lines = [
            f"{self.model}: {self.plan.describe()}",
            f"GPU           {self.device}",
            f"allocated     {self.allocated}",
            f"reserved      {self.reserved}",
            f"device total  {self.device_total}",
            f"peak at       {self.peak_operation}",
        ]
        if self.out_of_memory is not None:
            lines.append(f"out of memory at {self.out_of_memory}")
        lines += [f"  {name:<22}{n / MIB:>12.1f} MiB" for name, n in self.by_category.items()]
        return "\n".join([*lines, *self.notes])

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "step": self.plan.describe(),
            "gpu": str(self.device),
            "allocated": self.allocated.to_dict(),
            "reserved": self.reserved.to_dict(),
            "device_total": self.device_total.to_dict(),
            "by_category_mib": {k.value: n / MIB for k, n in self.by_category.items()},
            "peak_operation": str(self.peak_operation),
            "fits": None if self.device.capacity_bytes is None else self.out_of_memory is None,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }


def predict(model: ModelLike, *, batch_size: int, **settings: Any) -> MemoryPrediction:
    """Predict the peak memory of one training step or inference, without a GPU or any computation.

    Args:
        model: Name (`tresnet_m`, `timm:resnet50`, `torchvision:vgg16_bn`), `torch.nn.Module` on the
            CPU or meta device, or function that builds a module. A module stays unchanged. The
            forward of the model takes one batch of images.
        batch_size: Number of samples in a micro-batch.
        settings: Fields of `tresnet.memory.plan.MemoryPlan` and of its parts, named like train.py's
            options. Options that build the model (norm, impl, num_classes, ...) need a model given
            by name.

    Raises:
        InputError: an argument is not valid, the model rejects its input, or an operation cannot
            run on fake tensors. The message names the cause and says what to do.
        ConfigError: timm has no optimizer named `opt`.
    """
    began = time.perf_counter()
    plan = plan_of("predict", batch_size, settings)
    device = plan.gpu
    name, module, resolved = make_plan(model, plan)
    trace = record(module, resolved, device)
    replayed = replay(trace, free_bytes(device))
    error = _relative_error(resolved)
    expected = replayed.peak_allocated_bytes
    high = max(replayed.high_bytes, expected)
    allocated = Estimate(expected, int(expected * (1 - error)), int(high * (1 + error)))
    peak_reserved = replayed.peak_reserved_bytes
    reserved = Estimate(
        peak_reserved,
        min(allocated.low_bytes, peak_reserved),
        max(int(peak_reserved * _RESERVED_RATIO), peak_reserved + allocated.high_bytes - expected),
    )
    failed = replayed.out_of_memory_event
    at_peak = trace.events[replayed.peak_event].op if replayed.allocated_bytes else None
    without_cuda = (
        "this torch was built without CUDA: predicted on fake CPU tensors, allocated within "
        f"{error:.0%}"
    )
    return MemoryPrediction(
        model=name,
        plan=resolved,
        device=device,
        allocated=allocated,
        reserved=reserved,
        device_total=Estimate(
            peak_reserved + device.context_bytes,
            reserved.low_bytes + device.context_low_bytes,
            reserved.high_bytes + device.context_high_bytes,
        ),
        end_allocated_bytes=replayed.allocated_bytes[-1] if replayed.allocated_bytes else 0,
        by_category=breakdown(trace, replayed),
        peak_operation=None if at_peak is None else trace.operations[at_peak],
        out_of_memory=None if failed is None else trace.operations[trace.events[failed].op],
        notes=() if torch.backends.cuda.is_built() else (without_cuda,),
        seconds=time.perf_counter() - began,
        trace=trace,
        replay=replayed,
    )


def record(model: nn.Module, plan: MemoryPlan, device: Device, **machine_options: Any) -> Trace:
    """Run two steps on fake tensors and return their trace; a step that fails raises InputError."""
    # Imported before the trace: at its import, timm computes constants, which the trace would
    # otherwise count as operations of the step.
    import timm.optim
    import timm.utils  # noqa: F401

    with contextlib.ExitStack() as stack:
        stack.enter_context(_LOCK)
        machine = FakeMachine(device, **machine_options)
        copied = [fake_copy(model, machine.mode)]
        if gc.isenabled():  # turned off: garbage collection would free tensors at arbitrary times
            gc.disable()
            stack.callback(gc.enable)
        stack.enter_context(machine.running())
        log = logging.getLogger("torch._subclasses.fake_tensor")
        stack.callback(setattr, log, "disabled", log.disabled)
        log.disabled = True  # it would print tracebacks of errors that `_as_input_error` describes
        try:
            # `pop` leaves no reference here, so that the unfolded model is freed after folding.
            run = (_training if plan.train else _inference)(copied.pop(), plan, machine)
            for number in range(1, STEPS + 1):
                machine.start_step()
                run(number)
        except TResNetError:
            raise
        except Exception as error:
            raise _as_input_error(error, machine.recorder.trace, plan) from error
        trace = machine.recorder.trace
        return replace(trace, events=list(trace.events))  # leaving the contexts adds more frees


def _training(model: nn.Module, plan: MemoryPlan, machine: FakeMachine) -> Callable[[int], None]:
    """Return a function that takes an optimizer step's number, and runs this step like train.py."""
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError(
            "expected a model with parameters to train, got none that requires a gradient: "
            "predict with train=False"
        )
    loss = plan.loss or default_loss
    with machine.during(Phase.SETUP, Category.BUFFERS):
        host = StepHost(
            device=machine.device,
            mixes=plan.mixes,
            build_optimizer=plan.optimizer,
            during=machine.during,
        )
        step = TrainingStep(model, plan.step, host)
    # With gradient checkpointing or without graphs, DistributedDataParallel averages gradients.
    settings = plan.step
    is_wrapped = settings.compute.cuda_graph == "off" or settings.build.grad_checkpointing
    machine.record_model(step.model, ddp=plan.ddp and is_wrapped)
    flat_gradients = None
    if plan.ddp and not is_wrapped:
        with machine.during(Phase.SETUP, Category.BUCKETS):
            flat_gradients = FlatGradients(step.model)
    if step.model_ema is not None:
        ema = step.model_ema.module
        machine.recorder.set_category([*ema.parameters(), *ema.buffers()], Category.EMA)
    _wrap_outputs(step.model)
    last_outputs: list[object] = []

    def criterion(output: Any, targets: torch.Tensor) -> torch.Tensor:
        return loss(output.value if isinstance(output, _Outputs) else output, targets)

    micro_batches = settings.optim.accumulate

    def run_micro_batch(is_last: bool, number: int) -> None:
        with machine.during(Phase.INPUT):
            ahead = _next_batch(plan, machine)
            images, targets = step.feed(*plan.batch())
        last_outputs[:] = step.backward(images, targets, criterion, micro_batches, is_last)
        if is_last:
            if flat_gradients is not None:
                with machine.during(Phase.BACKWARD):
                    flat_gradients.collect()
            step.optimizer_step(number)
            for state in step.optimizer.state.values():
                machine.recorder.set_category(state.values(), Category.OPTIMIZER)
        del ahead

    def run(number: int) -> None:
        for index in range(micro_batches):
            run_micro_batch(index == micro_batches - 1, number)

    return run


def _inference(model: nn.Module, plan: MemoryPlan, machine: FakeMachine) -> Callable[[int], None]:
    with machine.during(Phase.SETUP):
        step = InferenceStep(model, plan.step.compute, machine.device, during=machine.during)
    machine.record_model(step.model)
    _wrap_outputs(step.model)
    last_outputs: list[object] = []

    def run(number: int) -> None:
        with machine.during(Phase.INPUT):
            ahead = _next_batch(plan, machine)
            images = step.feed.images(plan.batch()[0])
        last_outputs[:] = [step(images)]
        del ahead

    return run


def _next_batch(plan: MemoryPlan, machine: FakeMachine) -> torch.Tensor | None:
    """Return the memory in which the GPU renders the next batch beside a step, or None."""
    size = plan.batch_size * plan.loader_bytes
    return torch.empty(size, dtype=torch.uint8, device=machine.device) if size else None


class _Outputs:
    """Model output that is not one tensor, with the methods that a step calls on logits."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def float(self) -> "_Outputs":
        return self._mapped(lambda t: t.float() if t.is_floating_point() else t)

    def detach(self) -> "_Outputs":
        return self._mapped(torch.Tensor.detach)

    def __getitem__(self, index: object) -> "_Outputs":
        return self

    def _mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "_Outputs":
        return _Outputs(tree_map_only(torch.Tensor, function, self.value))


def _wrap_outputs(model: nn.Module) -> None:
    model.register_forward_hook(
        lambda _, __, output: output if isinstance(output, torch.Tensor) else _Outputs(output)
    )


def _relative_error(plan: MemoryPlan) -> float:
    if torch.backends.cuda.is_built():
        return RELATIVE_ERROR
    return _RELATIVE_ERROR_CPU_FP32 if plan.step.compute.amp == "off" else _RELATIVE_ERROR_CPU_AMP


# An error message that contains one of these texts means that a GPU or a tensor's data is missing.
_MISSING_DATA = (
    "data is not allocated",
    "CUDA support was not enabled",
    "compiled with CUDA enabled",
    "CUDA driver",
    "NVIDIA driver",
)
_NO_KERNEL = (
    NotImplementedError,
    fakes.UnsupportedFakeTensorException,
    fakes.UnsupportedOperatorException,
)


def _as_input_error(error: Exception, trace: Trace, plan: MemoryPlan) -> InputError:
    operation = trace.operations[-1] if trace.operations else Operation("", Phase.SETUP, "", 0)
    at = f"{operation.name} in {operation.module}" if operation.module else operation.name
    text = str(error).strip() or type(error).__name__
    reason = text.splitlines()[0]
    cause = f"({type(error).__name__}: {reason})"
    if isinstance(error, fakes.DataDependentOutputException | fakes.DynamicOutputShapeException):
        return InputError(
            f"{at} depends on the values of a tensor, which a prediction does not have "
            f"({_innermost(error) or reason}): replace this operation, or pass the part of "
            "the model without this operation"
        )
    if any(sign in text for sign in _MISSING_DATA):
        return InputError(
            f"code after {at} needs a tensor's data or the GPU itself, outside of PyTorch's "
            f"operators ({reason}): replace this code for the prediction, such as "
            "norm='inplace_abn' by norm='abn'"
        )
    if isinstance(error, _NO_KERNEL) or "fake impl" in text or "Meta" in text:
        return InputError(
            f"{at} cannot run on fake tensors ({reason}): give this operator a fake kernel "
            "with torch.library.register_fake, or replace it for the prediction"
        )
    if operation.phase is Phase.SETUP:
        what, todo = "the step could not be set up on fake tensors", "the model and the optimizer"
        return InputError(f"{what} {cause}: check {todo}")
    if operation.phase is Phase.OPTIMIZER:
        return InputError(
            f"the optimizer {plan.optimizer_name} failed on fake tensors after {operation.name} "
            f"{cause}: predict with another optimizer"
        )
    return InputError(
        f"the model failed on a fake batch of {plan.batch_size} of {plan.describe_sample()} "
        f"at {at} {cause}: check input_size and the model, which must take a batch of images"
    )


def _innermost(error: Exception) -> str | None:
    """Return the traceback's last line outside torch and tresnet.memory; None if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/torch/" not in f.filename and "tresnet/memory" not in f.filename]
    return f"{ours[-1].line} in {ours[-1].name}" if ours else None
