"""Settings of a memory prediction, checked together with the model before anything runs."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from annotated_types import MinLen
from torch import nn
from torch.utils._pytree import tree_leaves

from tresnet.errors import InputError
from tresnet.layers.folded_conv import FoldedConv
from tresnet.memory.device import Device, find_device
from tresnet.models.tresnet import TResNet
from tresnet.peers import build_named, build_without_data, default_input_shape
from tresnet.settings import Input, ModelStep, TrainingBuild
from tresnet.settings.fields import (
    Count,
    CountOrZero,
    Settings,
    Size,
    changed,
    check,
    flatten,
    replace,
)
from tresnet.settings.model import ModelShape

ModelLike = str | nn.Module | Callable[[], nn.Module]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Loss = Callable[[Any, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan(Settings):
    """Settings of one training step or one inference on micro-batches of `batch_size` samples.

    Attributes:
        step: Settings of the step, as of train.py.
        shape: Options of a model given by name.
        device: Name in `tresnet.memory.list_devices()` or a `Device`. None means this machine's
            GPU, or else an assumed GPU with compute capability 8.0 and unlimited memory.
        gpu_memory: Memory of the GPU, such as `80GiB`; overrides the memory of `device`.
        train: True for a training step, False for an inference.
        num_classes: Number of classes of a model given by name; None for the model's default.
        input_size: (H, W), shape of a sample, or side of a square image; None for the default size.
        input: Type of the images, as for `tresnet.settings.Input`.
        optimizer: An optimizer class or a function that builds one; None for that of `step`.
        mixes: Whether mixup or CutMix runs on the GPU, on images converted to floating point.
        loss: Function of output and target that returns a scalar; None for cross entropy.
        target_size: Shape of one sample's floating-point target; None if targets are class indices.
        ddp: Whether to include the memory from which several processes exchange gradients: buckets
            of DistributedDataParallel with `cuda_graph` off or `grad_checkpointing`, otherwise one
            flat tensor.
        loader_bytes: Bytes for each sample in which the GPU prepares the next batch beside a step.
    """

    batch_size: Size
    step: ModelStep = dataclasses.field(default_factory=ModelStep)
    shape: ModelShape = dataclasses.field(default_factory=ModelShape)
    device: str | Device | None = None
    gpu_memory: str | int | None = None
    train: bool = True
    num_classes: CountOrZero | None = None
    input_size: Size | Annotated[Sequence[Size], MinLen(1)] | None = None
    input: Input = "float"
    optimizer: OptimizerFactory | None = None
    mixes: bool = False
    loss: Loss | None = None
    target_size: Annotated[Sequence[Count], MinLen(1)] | None = None
    ddp: bool = False
    loader_bytes: CountOrZero = 0

    @property
    def gpu(self) -> Device:
        return find_device(self.device, self.gpu_memory)

    @property
    def optimizer_name(self) -> str:
        """Timm's name of the optimizer, or the lower-case name of the class or function."""
        if self.optimizer is None:
            return self.step.optim.opt
        return getattr(self.optimizer, "__name__", "custom").lower()

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return uninitialised images and targets on the CPU, like a batch of a data loader."""
        assert isinstance(self.input_size, tuple), "filled in by make_plan"
        dtype = torch.uint8 if self.input == "uint8" else torch.float32
        shape = self.batch_size, *self.input_size
        images = torch.empty(shape, dtype=dtype, memory_format=self.step.compute.memory_format)
        if self.target_size is None:
            return images, torch.empty((self.batch_size,), dtype=torch.int64)
        return images, torch.empty((self.batch_size, *self.target_size))

    def describe_sample(self) -> str:
        """Return the shape of a sample, such as `3x224x224`."""
        assert isinstance(self.input_size, tuple), "filled in by make_plan"
        return "x".join(map(str, self.input_size))

    def describe(self) -> str:
        """Return the settings in one line: `train, batch 128 of 3x224x224, fp32, sgd`."""
        training, compute, optim = self.train, self.step.compute, self.step.optim
        parts = {
            "train" if training else "inference": True,
            f"batch {self.batch_size} of {self.describe_sample()}": True,
            "uint8 input": self.input == "uint8",
            compute.dtype: compute.amp == "off",
            f"{compute.amp} autocast": compute.amp != "off",
            self.optimizer_name: training,
            "channels_last": compute.channels_last,
            f"train_only {' '.join(optim.train_only or ())}": training and optim.train_only,
            f"accumulate {optim.accumulate}": training and optim.accumulate > 1,
            "grad_checkpointing": training and self.step.build.grad_checkpointing,
            "ema_decay": training and self.step.ema.ema_decay,
            "clip_grad": training and optim.clip_grad,
            "ddp": training and self.ddp,
            "folded": compute.fold and not training,
        }
        return ", ".join(part for part, holds in parts.items() if holds)


def plan_of(function: str, batch_size: int, settings: Mapping[str, Any]) -> MemoryPlan:
    """Return the plan with these fields of a plan, by name; `function` is their caller's name.

    `opt` may also be an optimizer class, or a function that builds an optimizer.
    """
    plan, fields = MemoryPlan(batch_size=batch_size), dict(settings)
    for name in fields.keys() - (flatten(plan).keys() - {"batch_size"}):
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    if callable(fields.get("opt")):
        fields["optimizer"] = fields.pop("opt")
    return replace(plan, **fields)


def make_plan(model: ModelLike, plan: MemoryPlan) -> tuple[str, nn.Module, MemoryPlan]:
    """Return the model's name, the model, and the checked plan with its defaults filled in."""
    check(plan, InputError, spell=str)
    # cuda_graph=auto is allowed: where no graph fits, steps run eagerly, as predicted.
    for name, most in (("compile", "none"), ("cuda_graph", "off or auto")):
        if (value := getattr(plan.step.compute, name)) not in most.split(" or "):
            raise InputError(f"{name}: expected {most}, got {value}: no prediction for this value")
    options = changed(plan.step.build, TrainingBuild()) | changed(plan.shape, ModelShape())
    options["num_classes"] = plan.num_classes
    options.pop("grad_checkpointing", None)  # of the step
    options = {name: value for name, value in options.items() if value is not None}
    if isinstance(model, str):
        name, built = model, build_named(model, device="meta", **options)
    elif options:
        raise InputError(
            f"expected settings of a step, got {', '.join(options)}: give these options to the "
            "function that builds the model, or pass the model's name"
        )
    else:
        is_function = callable(model) and not isinstance(model, nn.Module)
        built = build_without_data(model) if is_function else model
        name = type(built).__name__
    if not isinstance(built, nn.Module):
        raise InputError(
            f"expected a model's name, a torch.nn.Module or a function that builds one, got {name}"
        )
    _check_model(built)
    plan.step.check_used(ModelStep(), training=plan.train, model=name, ours=True)
    compute = plan.step.compute
    folds = compute.fold and not plan.train and isinstance(built, TResNet)
    folds = folds and not any(isinstance(module, FoldedConv) for module in built.modules())
    size = _input_shape(built, plan.input_size)
    channels_last = compute.channels_last and len(size) == 3  # only images can be channels-last
    compute = dataclasses.replace(compute, fold=folds, channels_last=channels_last)
    step = dataclasses.replace(plan.step, compute=compute.decided(plan.gpu.capability))
    return name, built, dataclasses.replace(plan, step=step, input_size=size)


def default_loss(output: object, target: torch.Tensor) -> torch.Tensor:
    """Sum the cross entropies of outputs that fit `target`, and the means of all other outputs."""
    losses = [
        F.cross_entropy(y, target)
        if y.shape == target.shape or (target.dim() == 1 and y.dim() == 2)
        else y.float().mean()
        for y in tree_leaves(output)
        if isinstance(y, torch.Tensor) and y.is_floating_point()
    ]
    if not losses:
        raise InputError("expected a model that returns floating-point tensors, got none")
    return functools.reduce(torch.add, losses)


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            raise InputError(
                f"expected a model without recurrent layers, got {type(module).__name__} at "
                f"{name or 'the top'}: cuDNN's memory for these layers is not published; measure "
                "the step on a GPU with torch.cuda.max_memory_allocated"
            )
    devices = {str(t.device) for t in (*model.parameters(), *model.buffers())}
    elsewhere = ", ".join(sorted(devices - {"cpu", "meta"}))
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        misfit = f"a model wrapped in {type(model).__name__}"
        todo = "pass model.module, and ddp=True for the memory of exchanged gradients"
    elif hasattr(model, "_orig_mod"):
        misfit = "a compiled model"
        todo = "pass the model before torch.compile; a compiler's memory is not predicted"
    elif isinstance(model, torch.jit.ScriptModule):
        misfit = "a TorchScript model"
        todo = "pass the model before torch.jit.script or torch.jit.trace"
    elif elsewhere:
        misfit, todo = f"a model on {elsewhere}", "predict before model.to, or pass model.cpu()"
    else:
        return
    raise InputError(f"expected an eager model on the CPU or the meta device, got {misfit}: {todo}")


def _input_shape(model: nn.Module, size: Any) -> tuple[int, ...]:
    channels, *sides = default_input_shape(model)
    sizes = sides if size is None else [size] if not isinstance(size, tuple | list) else [*size]
    if len(sizes) > 2:
        return tuple(sizes)
    return channels, *(sizes * 2 if len(sizes) == 1 else sizes)
