"""The memory of a training step or an inference, before it runs and without a GPU."""

import contextlib
import gc
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor as fakes

from tresnet.errors import InputError, TResNetError
from tresnet.memory.allocator import SMALL_SEGMENT_BYTES
from tresnet.memory.device import Device, find_device
from tresnet.memory.events import Category, Phase, Trace
from tresnet.memory.formula import formula
from tresnet.memory.machine import FakeMachine
from tresnet.memory.models import ModelLike, find_model
from tresnet.memory.plan import Plan, make_plan
from tresnet.memory.replay import Replay, activations_by_module, breakdown, replay
from tresnet.memory.result import Estimate, Prediction
from tresnet.memory.step import start
from tresnet.memory.workspaces import Workspaces

# The first step makes gradients and optimizer state, the second reaches the peak that all later
# ones reach too.
STEPS = 2

# How far reserved may lie above its simulation: the order of backward and the sizes of
# workspaces fragment the cache.
_RESERVED_ABOVE = 1.10

# The largest miss on the document's models, workspaces apart, is 0.5 % (ViT-B/16).
_DOUBT = 0.01
# Fakes of CPU tensors differ from CUDA in what mixed precision keeps.
_DOUBT_CPU_FAKE_FP32 = 0.02
_DOUBT_CPU_FAKE_AMP = 0.10


def predict(
    model: ModelLike,
    *,
    batch_size: int,
    device: str | Device | None = None,
    gpu_memory: str | int | None = None,
    workspaces: Workspaces | None = None,
    model_options: dict[str, object] | None = None,
    method: str = "trace",
    **step: Any,
) -> Prediction:
    """Predict the peak memory of one training step or inference. No GPU is used, nothing runs.

    Args:
        model: `tresnet_m`, `timm:resnet50`, `torchvision:vgg16_bn`, a `torch.nn.Module` on the
            CPU or meta device, which is left as it is, or a function that builds one.
        batch_size: images a step.
        device: the GPU to predict for: one of `tresnet.memory.list_devices()` or a `Device`; by
            default the one of this machine, or none in particular.
        gpu_memory: its memory, such as `80GiB`, in place of the described one.
        workspaces: a table of cuDNN workspaces measured on that GPU.
        model_options: keyword arguments for a model given by name.
        method: `trace`; or `formula` for the sum over layers that people use, which knows neither
            reserved nor a band: `tresnet.memory.formula`.
        **step: what the step is; see `tresnet.memory.plan.make_plan`: input_size, input_dtype, amp,
            optimizer, optimizer_options, train, loss, target_size, channels_last, accumulation_steps,
            checkpointing, ema, ddp, ddp_bucket_mib, ddp_bucket_view, zero_grad_to_none.

    Raises:
        InputError: an argument does not fit, the model rejects its input, or one of its
            operations cannot be faked; the message names it and says what to do.
    """
    began = time.perf_counter()
    described = find_device(device, gpu_memory)
    name, module = find_model(model, model_options)
    plan = make_plan(module, batch_size=batch_size, **step)
    if method == "formula":
        return _by_formula(name, module, plan, described, began)
    if method != "trace":
        raise InputError(f"expected method 'trace' or 'formula', got {method!r}")
    trace = record(module, plan, described, workspaces or Workspaces())
    return conclude(name, plan, described, trace, began)


def record(
    model: nn.Module,
    plan: Plan,
    device: Device,
    workspaces: Workspaces,
    *,
    steps: int = STEPS,
    **machine_options: Any,
) -> Trace:
    """Run `steps` steps on fakes and return what they did to memory.

    Raises:
        InputError: the model rejects its input, or cannot be faked.
    """
    machine = FakeMachine(device, workspaces, **machine_options)
    copied = machine.copy(model, plan)
    with _no_garbage_collection(), machine.running():
        machine.place(copied, plan)
        try:
            run = start(copied, plan, machine)
            for _ in range(steps):
                run.step()
        except TResNetError:
            raise
        except Exception as error:
            raise _explained(error, machine.trace, plan) from error
        # What follows is the teardown, which is not part of the run.
        return machine.trace.settled()


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep the collector from freeing cycles at a moment that depends on earlier work."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def conclude(
    name: str, plan: Plan, device: Device, trace: Trace, began: float | None = None
) -> Prediction:
    """Run the trace through the allocator and state the results with their bands."""
    began = time.perf_counter() if began is None else began
    free = None
    if device.capacity_bytes is not None:
        free = max(device.capacity_bytes - device.context_bytes, SMALL_SEGMENT_BYTES)
    replayed = replay(trace, free)
    allocated = _allocated(plan, replayed)
    reserved = _reserved(replayed, allocated)
    failed = replayed.out_of_memory_event
    at_peak = trace.events[replayed.peak_event].op if replayed.allocated_bytes else None
    return Prediction(
        model=name,
        plan=plan,
        device=device,
        allocated=allocated,
        reserved=reserved,
        device_total=_device_total(device, reserved),
        end_allocated_bytes=replayed.allocated_bytes[-1] if replayed.allocated_bytes else 0,
        by_category=breakdown(trace, replayed),
        by_module=activations_by_module(trace, replayed),
        peak_operation=None if at_peak is None else trace.operations[at_peak],
        out_of_memory=None if failed is None else trace.operations[trace.events[failed].op],
        notes=tuple(_notes(plan)),
        seconds=time.perf_counter() - began,
        trace=trace,
        replay=replayed,
    )


def _by_formula(
    name: str, model: nn.Module, plan: Plan, device: Device, began: float
) -> Prediction:
    """The formula's one number as a prediction: its total stands for all three."""
    terms = formula(model, plan)
    total = terms.training_bytes if plan.train else terms.inference_bytes
    estimate = Estimate(total, total, total)
    return Prediction(
        model=name,
        plan=plan,
        device=device,
        allocated=estimate,
        reserved=estimate,
        device_total=_device_total(device, estimate),
        end_allocated_bytes=0,
        by_category={
            Category.INPUT: terms.data_bytes,
            Category.PARAMETERS: terms.weight_bytes,
            Category.ACTIVATIONS: terms.output_bytes,
        },
        by_module={},
        peak_operation=None,
        out_of_memory=None,
        notes=("by formula: a sum over layers, with no allocator and no band",),
        seconds=time.perf_counter() - began,
        trace=Trace(),
        replay=replay(Trace()),
    )


def _doubt(plan: Plan) -> float:
    """The share by which allocated may be off, workspaces apart."""
    if torch.backends.cuda.is_built():
        return _DOUBT
    return _DOUBT_CPU_FAKE_FP32 if plan.amp is None else _DOUBT_CPU_FAKE_AMP


def _allocated(plan: Plan, replayed: Replay) -> Estimate:
    expected, doubt = replayed.peak_allocated_bytes, _doubt(plan)
    high = max(replayed.high_bytes, expected)
    return Estimate(expected, int(expected * (1 - doubt)), int(high * (1 + doubt)))


def _reserved(replayed: Replay, allocated: Estimate) -> Estimate:
    expected = replayed.peak_reserved_bytes
    more_allocated = allocated.high_bytes - allocated.expected_bytes
    high = max(int(expected * _RESERVED_ABOVE), expected + more_allocated)
    return Estimate(expected, min(allocated.low_bytes, expected), high)


def _device_total(device: Device, reserved: Estimate) -> Estimate:
    return Estimate(
        reserved.expected_bytes + device.context_bytes,
        reserved.low_bytes + device.context_low_bytes,
        reserved.high_bytes + device.context_high_bytes,
    )


def _notes(plan: Plan) -> list[str]:
    if torch.backends.cuda.is_built():
        return []
    return [
        "this torch was built without CUDA: predicted on fakes of CPU tensors, "
        f"allocated within {_doubt(plan):.0%}"
    ]


def _explained(error: Exception, trace: Trace, plan: Plan) -> InputError:
    """The user's view of what went wrong while the step ran on fakes."""
    operation = trace.operations[-1]
    where = f" in {operation.module}" if operation.module else ""
    if isinstance(error, fakes.DataDependentOutputException | fakes.DynamicOutputShapeException):
        return InputError(
            f"{operation.name}{where} depends on the values of a tensor, which a prediction does "
            f"not have ({_innermost(error)}): replace it, or pass the part of the model without it"
        )
    if isinstance(error, fakes.UnsupportedFakeTensorException | NotImplementedError) or (
        isinstance(error, fakes.UnsupportedOperatorException)
        or "fake impl" in str(error)
        or "Meta" in str(error)
    ):
        return InputError(
            f"{operation.name}{where} cannot be faked ({_first_line(error)}): give it a fake "
            "kernel with torch.library.register_fake, or replace it for the prediction"
        )
    if "data is not allocated" in str(error):
        return InputError(
            f"something after {operation.name}{where} reads a tensor's data outside of PyTorch's "
            f"operators ({_first_line(error)}): replace it for the prediction, such as "
            "norm='inplace_abn' by norm='abn'"
        )
    if operation.phase is Phase.OPTIMIZER:
        return InputError(
            f"the optimizer {plan.optimizer_name} failed on fakes after {operation.name} "
            f"({type(error).__name__}: {_first_line(error)}): predict with another one"
        )
    shape = "x".join(map(str, plan.input_shape))
    return InputError(
        f"the model failed on a fake input of {shape} at {operation.name}{where} "
        f"({type(error).__name__}: {_first_line(error)}): check input_size and the model"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _innermost(error: Exception) -> str:
    """The line of the model that asked: the last one outside of torch."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/torch/" not in f.filename and "tresnet/memory" not in f.filename]
    return f"{ours[-1].line} in {ours[-1].name}" if ours else _first_line(error)
