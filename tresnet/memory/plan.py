"""What one step is: the model and the settings, checked before anything runs."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tresnet.errors import InputError
from tresnet.models.named import (
    build_named,
    build_without_data,
    default_input_shape,
    split_name,
)
from tresnet.models.tresnet import TResNet
from tresnet.settings import Amp, Compute, Dtype, InferenceCompute, OptimConfig
from tresnet.steps.optim import training_pad

ModelLike = str | nn.Module | Callable[[], nn.Module]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Loss = Callable[[Any, torch.Tensor], torch.Tensor]

_MOST = 2**31 - 1  # more images or pixels overflow what PyTorch counts in
_INPUTS = {"float": torch.float32, "uint8": torch.uint8}


@dataclasses.dataclass(frozen=True)
class Plan:
    """One training step or one inference; the names are those of train.py's options.

    Attributes:
        batch_size: images a pass.
        input_size: side of the square, (H, W), or a whole shape without the batch; None for the
            model's own. `resolved` makes it a whole shape.
        train: forward, backward and update; else inference.
        input: what the loader gives, `float` or `uint8`.
        mixes: whether images are mixed on the GPU, so that they must be floats.
        amp: `off`, `bf16` or `fp16`.
        channels_last: layout of images and weights.
        optimizer: timm's name of one, an `OptimConfig`, a class, or a function from parameters to
            an optimizer.
        ema_decay: of the moving average of the weights; 0 for none.
        clip_grad: largest norm of the gradients.
        accumulate: passes an update.
        grad_checkpointing: recompute activations: True for the model's own choice, or the names
            of the submodules to recompute.
        loss: from output and target to a scalar; None for cross entropy.
        target_size: shape of an image's float target; None for a class index.
        ddp: with the gradient buckets of DistributedDataParallel.
        dtype: type of the weights in inference.
        fold: fold norms into convolutions in inference; None for our models alone, as eval.py does.
        compile: `none`: what a compiler saves is not predicted.
        cuda_graph: False: what a captured graph reserves is not predicted.
    """

    batch_size: int
    input_size: int | tuple[int, ...] | None = None
    train: bool = True
    input: str = "float"
    mixes: bool = False
    amp: str = "off"
    channels_last: bool = False
    optimizer: str | OptimConfig | OptimizerFactory = "sgd"
    ema_decay: float = 0.0
    clip_grad: float | None = None
    accumulate: int = 1
    grad_checkpointing: bool | tuple[str, ...] = False
    loss: Loss | None = None
    target_size: tuple[int, ...] | None = None
    ddp: bool = False
    dtype: str = "fp32"
    fold: bool | None = None
    compile: str = "none"
    cuda_graph: bool = False

    def resolved(self, model: nn.Module) -> "Plan":
        """The plan with the input's whole shape.

        Raises:
            InputError: which setting, what was expected and what came.
        """
        for names, is_right, expected in _CHECKS:
            for name in names.split():
                if not is_right(value := getattr(self, name)):
                    what, colon, why = expected.partition(":")
                    raise InputError(f"expected {name} {what}, got {value!r}{colon}{why}")
        if self.train and (self.dtype != "fp32" or self.fold):
            raise InputError(
                "expected dtype 'fp32' and no fold in training, got "
                f"dtype {self.dtype!r} and fold {self.fold!r}: predict inference, or amp instead"
            )
        parts = self.grad_checkpointing
        return dataclasses.replace(
            self,
            input_size=_input_shape(model, self.input_size),
            grad_checkpointing=parts if isinstance(parts, bool) else tuple(parts),
            fold=not self.train and isinstance(model, TResNet) if self.fold is None else self.fold,
        )

    @property
    def compute(self) -> Compute:
        """Precision and layout, as `tresnet.steps` takes them."""
        if self.train:
            return Compute(amp=self.amp, channels_last=self.channels_last)  # pyright: ignore
        return InferenceCompute(
            amp=self.amp,  # pyright: ignore[reportArgumentType]
            channels_last=self.channels_last,
            dtype=self.dtype,  # pyright: ignore[reportArgumentType]
            fold=bool(self.fold),
        )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of a resolved plan: (N, C, H, W) for images."""
        assert isinstance(self.input_size, tuple), "filled in by resolved"
        return self.batch_size, *self.input_size

    @property
    def optimizer_name(self) -> str:
        """The optimizer in a word."""
        if isinstance(self.optimizer, OptimConfig):
            return self.optimizer.opt
        name = self.optimizer if isinstance(self.optimizer, str) else None
        return (name or getattr(self.optimizer, "__name__", "custom")).lower()

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Images and targets as a loader gives them, on the CPU."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        images = torch.empty(self.input_shape, dtype=_INPUTS[self.input], memory_format=layout)
        if self.target_size is None:
            return images, torch.empty((self.batch_size,), dtype=torch.int64)
        return images, torch.empty((self.batch_size, *self.target_size))

    def describe(self) -> str:
        """`train, batch 128 of 3x224x224, fp32, sgd`."""
        size = "x".join(map(str, self.input_shape[1:]))
        parts = ["train" if self.train else "inference", f"batch {self.batch_size} of {size}"]
        if self.input == "uint8":
            parts.append("uint8 input")
        parts.append(self.dtype if self.amp == "off" else f"{self.amp} autocast")
        if self.train:
            parts.append(self.optimizer_name)
        if self.channels_last:
            parts.append("channels_last")
        if self.train and self.accumulate > 1:
            parts.append(f"accumulate {self.accumulate}")
        switches = ("grad_checkpointing", "ema_decay", "clip_grad", "ddp")
        parts += [name for name in switches if self.train and getattr(self, name)]
        if not self.train and self.fold:
            parts.append("folded")
        return ", ".join(parts)


STEP_SETTINGS = tuple(field.name for field in dataclasses.fields(Plan))


def make_plan(model: ModelLike, **settings: Any) -> tuple[str, nn.Module, Plan]:
    """A printable name, the model (without data where it is built here), and the resolved plan.

    Args:
        model: `tresnet_m`, `timm:resnet50`, `torchvision:vgg16_bn`, a module on the CPU or on the
            meta device, or a function that builds one.
        **settings: of the step, see `Plan`; the others are options of a model given by name, such
            as `norm`, `recompute` or `num_classes`. One of ours is padded for training as train.py
            pads it, unless `pad` says otherwise.

    Raises:
        InputError: an unknown name or setting, or a model that cannot be predicted.
        MissingDependencyError: an option's package is not installed.
    """
    step = {name: settings.pop(name) for name in STEP_SETTINGS if name in settings}
    if isinstance(model, str):
        if split_name(model)[0] == "tresnet" and step.get("train", True):
            opt = step.get("optimizer", "sgd")
            opt = opt.opt if isinstance(opt, OptimConfig) else opt if isinstance(opt, str) else ""
            settings["pad"] = training_pad(settings.get("pad"), opt, on_gpu=True)
        name, built = model, build_named(model, device="meta", **settings)
    elif settings:
        raise InputError(
            f"expected settings of a step ({', '.join(STEP_SETTINGS)}), got {', '.join(settings)}: "
            "options of a model go with its name; build the model with them"
        )
    elif isinstance(model, nn.Module):
        name, built = type(model).__name__, model
    elif callable(model):
        built = build_without_data(model)
        name = type(built).__name__
    else:
        raise InputError(
            f"expected a model's name, a torch.nn.Module or a function that builds one, "
            f"got {type(model).__name__}"
        )
    _check_model(built)
    return name, built, Plan(**step).resolved(built)


def default_loss(output: object, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy where an output has the form of logits for the target, else its mean.

    Summed over all floating-point tensors of the output, auxiliary heads included.
    """
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
                "recompute, for example grad_checkpointing=['layer1', 'layer2']"
            )
        enable(True)
    for name in () if isinstance(what, bool) else what:
        try:
            module = model.get_submodule(name)
        except AttributeError as error:
            names = ", ".join(child for child, _ in model.named_children())
            raise InputError(
                f"expected the name of a submodule to recompute ({names}, or deeper), got {name!r}"
            ) from error
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)


def _check_model(model: object) -> None:
    """Refuse what cannot be predicted, with the way out."""
    expected, got, todo = "an eager model", "", ""
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a torch.nn.Module, got {type(model).__name__}")
    places = {str(t.device) for t in (*model.parameters(), *model.buffers())}
    elsewhere = sorted(place for place in places if place not in ("cpu", "meta"))
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        expected, got = "the model itself", f"it wrapped in {type(model).__name__}"
        todo = "pass model.module, and ddp=True for the memory of gradient buckets"
    elif hasattr(model, "_orig_mod"):
        got = "a compiled one"
        todo = "pass the model before torch.compile; what a compiler saves is not predicted"
    elif isinstance(model, torch.jit.ScriptModule):
        got = "a TorchScript one"
        todo = "pass the model before torch.jit.script or torch.jit.trace"
    elif elsewhere:
        expected, got = "a model on the CPU or the meta device", f"one on {', '.join(elsewhere)}"
        todo = "predict before moving it, or pass model.cpu()"
    if got:
        raise InputError(f"expected {expected}, got {got}: {todo}")


def _input_shape(model: nn.Module, size: Any) -> tuple[int, ...]:
    channels, *sides = default_input_shape(model)
    sizes = sides if size is None else [size] if not isinstance(size, tuple | list) else [*size]
    if len(sizes) > 2:
        return tuple(sizes)
    return channels, *(sizes * 2 if len(sizes) == 1 else sizes)


def _is_whole(value: object) -> bool:
    return type(value) is int and 1 <= value <= _MOST


def _are_whole(value: Any) -> bool:
    return isinstance(value, tuple | list) and bool(value) and all(map(_is_whole, value))


def _is_number(value: Any, below: float = math.inf) -> bool:
    return type(value) in (int, float) and 0 <= value < below


def _is_one_of(*choices: object) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(c) and value == c for c in choices)


def _or_none(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_right(value)


def _names(choices: Iterable[object]) -> str:
    return "out of " + ", ".join(map(repr, choices))


_SIZE = "as positive whole numbers (224, (H, W) or (C, H, W))"
_OPTIMIZER = "by timm's name, a class or a function from parameters to one"
# Settings, whether a value is right, and what is expected.
_CHECKS: list[tuple[str, Callable[[Any], bool], str]] = [
    ("batch_size accumulate", _is_whole, "to be a whole number from 1 on"),
    ("train mixes channels_last ddp", _is_one_of(True, False), "out of True, False"),
    ("fold", _is_one_of(True, False, None), "out of True, False, None"),
    ("amp", _is_one_of(*get_args(Amp)), _names(get_args(Amp))),
    ("input", _is_one_of(*_INPUTS), _names(_INPUTS)),
    ("dtype", _is_one_of(*get_args(Dtype)), _names(get_args(Dtype))),
    ("input_size", _or_none(lambda v: _is_whole(v) or _are_whole(v)), _SIZE),
    ("target_size", _or_none(_are_whole), "to be whole numbers from 1 on, in a tuple"),
    ("optimizer", lambda v: isinstance(v, str | OptimConfig) or callable(v), _OPTIMIZER),
    ("ema_decay", lambda v: _is_number(v, below=1), "to be a number from 0 on and below 1"),
    ("clip_grad", _or_none(_is_number), "to be a number from 0 on"),
    ("grad_checkpointing", lambda v: isinstance(v, bool | tuple | list), "as a tuple or a list"),
    ("compile", _is_one_of("none"), "'none': what a compiler saves is not predicted"),
    ("cuda_graph", _is_one_of(False), "off: what a captured graph reserves is not predicted"),
]
