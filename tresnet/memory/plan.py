"""Settings of a memory prediction, checked together with the model before anything runs."""

# Fields of a plan accept functions and tuples, unlike the command-line options that they override.
# pyright: reportIncompatibleVariableOverride=false

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from annotated_types import MinLen
from torch import nn
from torch.utils._pytree import tree_leaves

from tresnet.checkpoints.creation import build_named, build_without_data, default_input_shape
from tresnet.errors import InputError
from tresnet.layers.folded_conv import FoldedConv
from tresnet.memory.device import Device, find_device
from tresnet.models.tresnet import TResNet
from tresnet.settings import ModelStep
from tresnet.settings.fields import Count, CountOrZero, Size, check
from tresnet.settings.model import ModelShape

ModelLike = str | nn.Module | Callable[[], nn.Module]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Loss = Callable[[Any, torch.Tensor], torch.Tensor]

P = ParamSpec("P")
S = TypeVar("S")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan(ModelStep, ModelShape):
    """Settings of one training step or one inference, without the batch size.

    Attributes:
        device: Name in `tresnet.memory.list_devices()` or a `Device`. None means this machine's
            GPU, or else an assumed GPU with compute capability 8.0 and unlimited memory.
        gpu_memory: Memory of the GPU, such as `80GiB`; overrides the memory of `device`.
        train: True for a training step, False for an inference.
        num_classes: Number of classes of a model given by name; None for the model's default.
        in_chans: Number of input channels of a model given by name; None for the model's default.
        input_size: (H, W), shape of a sample, or side of a square image; None for the default size.
        opt: timm's name of an optimizer, an optimizer class, or a function that builds one.
        mixes: Whether mixup or CutMix runs on the GPU, on images converted to floating point.
        loss: Function of output and target that returns a scalar; None for cross entropy.
        target_size: Shape of one sample's floating-point target; None if targets are class indices.
        ddp: Whether to include the memory from which several processes exchange gradients: buckets
            of DistributedDataParallel with `cuda_graph` off or `grad_checkpointing`, otherwise one
            flat tensor.
        loader_bytes: Bytes for each sample in which a loader prepares the next training batch.
    """

    device: str | Device | None = None
    gpu_memory: str | int | None = None
    train: bool = True
    num_classes: CountOrZero | None = None
    in_chans: Count | None = None
    input_size: Size | Annotated[Sequence[Size], MinLen(1)] | None = None
    opt: str | OptimizerFactory = "sgd"
    mixes: bool = False
    loss: Loss | None = None
    target_size: Annotated[Sequence[Count], MinLen(1)] | None = None
    ddp: bool = False
    loader_bytes: CountOrZero = 0

    @property
    def gpu(self) -> Device:
        return find_device(self.device, self.gpu_memory)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan(StepPlan):
    """Settings of one training step or one inference on micro-batches of `batch_size` samples."""

    batch_size: Size

    @property
    def optimizer_name(self) -> str:
        """`opt` if it is a string, otherwise the lower-case name of the class or function."""
        if isinstance(self.opt, str):
            return self.opt
        return getattr(self.opt, "__name__", "custom").lower()

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return uninitialised images and targets on the CPU, like a batch of a data loader."""
        assert isinstance(self.input_size, tuple), "filled in by make_plan"
        dtype = torch.uint8 if self.input == "uint8" else torch.float32
        shape = self.batch_size, *self.input_size
        images = torch.empty(shape, dtype=dtype, memory_format=self.memory_format)
        if self.target_size is None:
            return images, torch.empty((self.batch_size,), dtype=torch.int64)
        return images, torch.empty((self.batch_size, *self.target_size))

    def describe_sample(self) -> str:
        """Return the shape of a sample, such as `3x224x224`."""
        assert isinstance(self.input_size, tuple), "filled in by make_plan"
        return "x".join(map(str, self.input_size))

    def describe(self) -> str:
        """Return the settings in one line: `train, batch 128 of 3x224x224, fp32, sgd`."""
        training = self.train
        parts = {
            "train" if training else "inference": True,
            f"batch {self.batch_size} of {self.describe_sample()}": True,
            "uint8 input": self.input == "uint8",
            self.dtype: self.amp == "off",
            f"{self.amp} autocast": self.amp != "off",
            self.optimizer_name: training,
            "channels_last": self.channels_last,
            f"accumulate {self.accumulate}": training and self.accumulate > 1,
            **{
                name: training and getattr(self, name)
                for name in ("grad_checkpointing", "ema_decay", "clip_grad", "ddp")
            },
            "folded": self.fold and not training,
        }
        return ", ".join(part for part, holds in parts.items() if holds)


def by_keywords(
    plan: Callable[P, S],
) -> Callable[[Callable[[ModelLike, S], R]], Callable[Concatenate[ModelLike, P], R]]:
    """Decorate a function of (model, plan), so that callers pass the plan's fields as keywords."""

    def decorate(function: Callable[[ModelLike, S], R]) -> Callable[Concatenate[ModelLike, P], R]:
        own = inspect.signature(function)
        model, _ = own.parameters.values()
        fields = inspect.signature(plan).parameters.values()
        signature = own.replace(parameters=[model, *fields])

        @functools.wraps(function)
        def call(model: ModelLike, *args: P.args, **settings: P.kwargs) -> R:
            try:
                signature.bind(model, *args, **settings)
            except TypeError as error:  # the new message names `function`, not `plan`
                raise TypeError(f"{function.__name__}() {error}") from None
            return function(model, plan(*args, **settings))

        call.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
        return call

    return decorate


def make_plan(model: ModelLike, plan: MemoryPlan) -> tuple[str, nn.Module, MemoryPlan]:
    """Return the model's name, the model, and the checked plan with its defaults filled in."""
    check(plan, InputError, spell=str)
    # cuda_graph=auto is allowed: where no graph fits, steps run eagerly, as predicted.
    for name, most in (("compile", "none"), ("cuda_graph", "off or auto")):
        if (value := getattr(plan, name)) not in most.split(" or "):
            raise InputError(f"{name}: expected {most}, got {value}: no prediction for this value")
    options = {**plan.build, **plan.values(ModelShape)}
    options |= {name: getattr(plan, name) for name in ("num_classes", "in_chans")}
    defaults = {field.name: field.default for field in dataclasses.fields(plan)}
    options = {name: value for name, value in options.items() if value != defaults[name]}
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
    plan.check_applies(training=plan.train, model=name, ours=True)
    folds = plan.fold and not plan.train and isinstance(built, TResNet)
    folds = folds and not any(isinstance(module, FoldedConv) for module in built.modules())
    size = _input_shape(built, plan.input_size)
    channels_last = plan.channels_last and len(size) == 3  # only images can be channels-last
    filled = {"fold": folds, "input_size": size, "channels_last": channels_last}
    return name, built, dataclasses.replace(plan, **filled).decided(plan.gpu.capability)


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
