"""What one step is: the model and the settings, checked before anything runs."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from tresnet.errors import InputError
from tresnet.models.named import build_named, build_without_data, default_input_shape
from tresnet.models.tresnet import TResNet
from tresnet.steps import Compute, InferenceCompute, OptimConfig
from tresnet.steps.settings import AMP_DTYPES, DTYPES

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
        _whole("batch_size", self.batch_size)
        _whole("accumulate", self.accumulate)
        for name in ("train", "mixes", "channels_last", "ddp", "cuda_graph"):
            _one_of(name, getattr(self, name), (True, False))
        _one_of("fold", self.fold, (True, False, None))
        _one_of("amp", self.amp, tuple(AMP_DTYPES))
        _one_of("input", self.input, tuple(_INPUTS))
        _one_of("dtype", self.dtype, tuple(DTYPES))
        if not (isinstance(self.optimizer, str | OptimConfig) or callable(self.optimizer)):
            raise InputError(
                "expected an optimizer by timm's name, a class or a function from parameters to "
                f"one, got {self.optimizer!r}"
            )
        if self.compile != "none":
            raise InputError(
                f"expected compile 'none', got {self.compile!r}: what a compiler saves is not "
                "predicted"
            )
        if self.cuda_graph:
            raise InputError(
                "expected no cuda_graph, got True: what a captured graph reserves is not predicted"
            )
        if self.train and (self.dtype != "fp32" or self.fold):
            raise InputError(
                "expected dtype 'fp32' and no fold in training, got "
                f"dtype {self.dtype!r} and fold {self.fold!r}: predict inference, or amp instead"
            )
        _number("ema_decay", self.ema_decay, below=1)
        if self.clip_grad is not None:
            _number("clip_grad", self.clip_grad)
        if self.target_size is not None:
            for size in _tuple_of("target_size", self.target_size):
                _whole("target_size", size)
        return dataclasses.replace(
            self,
            input_size=_input_shape(model, self.input_size),
            grad_checkpointing=_checkpointed(self.grad_checkpointing),
            fold=not self.train and isinstance(model, TResNet) if self.fold is None else self.fold,
        )

    @property
    def compute(self) -> Compute:
        """Precision and layout, as `tresnet.steps` takes them."""
        if self.train:
            return Compute(self.amp, self.channels_last)  # pyright: ignore[reportArgumentType]
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
            as `norm`, `recompute` or `num_classes`.

    Raises:
        InputError: an unknown name or setting, or a model that cannot be predicted.
        MissingDependencyError: an option's package is not installed.
    """
    step = {name: settings.pop(name) for name in STEP_SETTINGS if name in settings}
    if isinstance(model, str):
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
    tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
    losses = [_one_loss(t, target) for t in tensors if t.is_floating_point()]
    if not losses:
        raise InputError("expected a model that returns floating-point tensors, got none")
    return losses[0] if len(losses) == 1 else sum(losses[1:], losses[0])


def _one_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    class_indices = target.dim() == 1 and output.dim() == 2
    if class_indices or output.shape == target.shape:
        return F.cross_entropy(output, target)
    return output.float().mean()


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
    for name in what or () if what is not True else ():
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


def _check_model(model: object) -> None:
    """Refuse what cannot be predicted, with the way out."""
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise InputError(
            f"expected the model itself, got it wrapped in {type(model).__name__}: pass "
            "model.module, and ddp=True for the memory of gradient buckets"
        )
    if hasattr(model, "_orig_mod"):
        raise InputError(
            "expected an eager model, got a compiled one: pass the model before torch.compile; "
            "what a compiler saves is not predicted"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            "expected an eager model, got a TorchScript one: pass the model before "
            "torch.jit.script or torch.jit.trace"
        )
    tensors = (*model.parameters(), *model.buffers())
    elsewhere = {str(t.device) for t in tensors if t.device.type not in ("cpu", "meta")}
    if elsewhere:
        raise InputError(
            f"expected a model on the CPU or the meta device, got one on "
            f"{', '.join(sorted(elsewhere))}: predict before moving it, or pass model.cpu()"
        )


def _input_shape(model: nn.Module, size: Any) -> tuple[int, ...]:
    usual = default_input_shape(model)
    if size is None:
        return usual
    sizes: tuple[int, ...] = tuple(size) if isinstance(size, tuple | list) else (size,)
    if not sizes or not all(type(n) is int and 0 < n <= _MOST for n in sizes):
        raise InputError(
            f"expected an input size of positive whole numbers (224, (H, W) or (C, H, W)), "
            f"got {size!r}"
        )
    if len(sizes) > 2:
        return sizes
    return (usual[0], *sizes) if len(sizes) == 2 else (usual[0], *sizes, *sizes)


def _checkpointed(what: Any) -> bool | tuple[str, ...]:
    return what if isinstance(what, bool) else _tuple_of("grad_checkpointing", what)


def _tuple_of(name: str, value: Any) -> tuple:
    if not isinstance(value, tuple | list):
        raise InputError(f"expected {name} as a tuple or a list, got {value!r}")
    return tuple(value)


def _whole(name: str, value: object) -> None:
    if type(value) is not int or not 1 <= value <= _MOST:
        raise InputError(f"expected {name} to be a whole number from 1 on, got {value!r}")


def _number(name: str, value: Any, below: float = math.inf) -> None:
    if type(value) not in (int, float) or not 0 <= value < below:
        limit = "" if below == math.inf else f" and below {below}"
        raise InputError(f"expected {name} to be a number from 0 on{limit}, got {value!r}")


def _one_of(name: str, value: object, choices: tuple) -> None:
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        names = ", ".join(map(repr, choices))
        raise InputError(f"expected {name} out of {names}, got {value!r}")
