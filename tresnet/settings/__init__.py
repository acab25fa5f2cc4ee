"""Settings of models, of their images and of their steps, each declared once.

The training configuration, `eval.py`, benchmarks and memory predictions are made of these classes.
The text under a field is the option's help on the command line, and the field's type holds the
range. Importing this module does not import PyTorch, so that `--help` is quick.
"""

import contextlib
import dataclasses
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from annotated_types import Ge, Le

from tresnet.errors import ConfigError, InputError
from tresnet.settings.fields import (
    Count,
    Fraction,
    FractionAbove0,
    FractionBelow1,
    Positive,
    PositiveOrZero,
    Settings,
    Size,
)
from tresnet.settings.model import LayerBuild

if TYPE_CHECKING:
    import torch

Amp = Literal["auto", "off", "bf16", "fp16"]
CompileMode = Literal[
    "none", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
]
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")  # modes that replay CUDA graphs
Dtype = Literal["fp32", "bf16", "fp16"]
Impl = Literal["auto", "triton", "plain"]
Input = Literal["float", "uint8"]
Sides = Size | tuple[Size, Size]  # one number for a square, or height and width, in pixels
Recompute = Literal["none", "activations"]
Capability = tuple[int, int]  # compute capability of a GPU, such as (8, 0)
BF16_CAPABILITY: Capability = (8, 0)  # older GPUs only emulate bf16


def sides(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return height and width of an `input_size`."""
    return (size, size) if isinstance(size, int) else size


def torch_dtype(name: Dtype) -> "torch.dtype":
    """Return PyTorch's dtype for a setting such as 'bf16'."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


# -- a model's build --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Build(LayerBuild):
    """Implementation of a model; no choice changes the model's function or checkpoints."""

    impl: Impl = "auto"
    """Implementation of operations between convolutions. triton: Triton kernels. plain: plain
    modules. auto: Triton kernels on a GPU where they run, otherwise plain modules."""


@dataclass(frozen=True, kw_only=True)
class TrainingBuild(Build):
    """Implementation of a model for training."""

    recompute: Recompute = "activations"
    """Tensors that backward recomputes on a GPU, if --norm is abn. none: no tensors. activations:
    outputs of norms."""
    grad_checkpointing: bool = False
    """Run the forward of each block again in backward, to save memory."""

    @property
    def build(self) -> dict[str, Any]:
        """Arguments of `tresnet.create`, without `grad_checkpointing`, which is set afterwards."""
        return {**self.values(Build), "recompute": self.recompute}


# -- a model's images -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ImageSize(Settings):
    """The size of a model's images."""

    input_size: Sides | None = None
    """Height and width of the input in pixels, or one number for both. None: the model's size."""


@dataclass(frozen=True, kw_only=True)
class EvalTransform(ImageSize):
    """Resizing and cropping of images for evaluation."""

    crop_pct: FractionAbove0 | None = None
    """Fraction of each side of the resized image that evaluation keeps. None: the model's value."""
    crop_mode: Literal["center", "squash", "border"] | None = None
    """How evaluation crops. center: keep the aspect ratio and cut off the edges. squash: change the
    aspect ratio to the input's. border: keep the aspect ratio and add black borders. None: the
    model's mode."""
    interpolation: Literal["bilinear", "bicubic"] | None = None
    """Resampling filter. None: the model's filter."""


@dataclass(frozen=True, kw_only=True)
class DataColumns(Settings):
    """Parts of a Hugging Face data set."""

    data_config: str | None = None
    """Configuration (subset) of a Hugging Face data set. None: the only one."""
    image_column: str | None = None
    """Column of images in a Hugging Face data set. None: the only one of the feature Image."""
    label_column: str | None = None
    """Column of labels in a Hugging Face data set. None: the only one of the feature ClassLabel, or
    of lists of it, or of numbers if its name is label, labels or cls."""


@dataclass(frozen=True, kw_only=True)
class ShardSettings(Settings):
    """Settings for converting images and writing them as a data set.

    Either `max_side` or `short_side` may be given. Larger images are shrunk by a Lanczos filter.
    Without `pixels`, shrunk images are encoded as JPEG, and others keep the bytes of their files.
    """

    max_side: Count | None = None
    """Shrink images whose longer side has more pixels than this; 500 keeps details."""
    short_side: Count | None = None
    """Shrink images whose shorter side has more pixels than this; 256 loads fastest."""
    quality: Annotated[int, Ge(1), Le(100)] = 90
    """JPEG quality of resized images."""
    pixels: bool = False
    """Store uncompressed PPM files: nothing to decode in training, but ten times the space."""


@dataclass(frozen=True, kw_only=True)
class StepInput(ImageSize):
    """Size and type of the images that a step reads."""

    input: Input = "float"
    """Type of the images. float: values in [0, 1]. uint8: bytes, which the step divides by 255. Our
    models in channels-last format read bytes directly."""


@dataclass(frozen=True)
class ExportOptions(StepInput, DataColumns):
    """Settings of an export and of the exported model's input."""

    format: Literal["onnx", "pt2", "aoti", "openvino"]
    """onnx: for onnxruntime and other runtimes. pt2: a program of torch.export. aoti: compiled by
    AOTInductor for this kind of machine. openvino: for Intel's CPUs."""
    dynamic_size: bool = False
    """For onnx and pt2: accept images of other heights and widths too. The number of images is
    never fixed."""
    channels_last: bool = False
    """For aoti: compile for images in channels-last memory format."""
    int8: bool = False
    """For onnx and pt2: use 8-bit weights and activations, with ranges measured on --data."""
    data: str | None = None
    """Directory of class folders or Hugging Face datasets, hf-hub:USER/NAME or a URL, with splits
    train and val. The export fails if top-1 on val falls by over 0.01 points, or by over 0.3 with
    --int8. --int8 measures ranges on train."""
    overwrite: bool = False
    """Replace the output if it exists."""


# -- how a step computes ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DeviceConfig(Settings):
    """The device that computes."""

    device: str = "auto"
    """cpu, cuda, cuda:N or auto. auto: a GPU if there is one, else the CPU."""


@dataclass(frozen=True, kw_only=True)
class Compute(Settings):
    """Precision, memory format and compiler of a step."""

    amp: Amp = "auto"
    """16-bit type of autocast; in training, fp16 also scales the loss. auto: bf16 on a GPU of
    compute capability 8.0 or more, fp16 on an older GPU, off on a CPU."""
    channels_last: bool = True
    """Keep images and weights in channels-last memory."""
    compile: CompileMode = "none"
    """Mode of torch.compile. none: run eagerly."""
    cuda_graph: Literal["off", "on", "auto"] = "auto"
    """Replay batches of frequent shapes as a CUDA graph, which saves CPU time. auto: only on one
    GPU and without --compile."""

    def decided(self, capability: Capability | None) -> Self:
        """Return a copy in which `amp` is not 'auto', for a GPU or for a CPU (None).

        Raises:
            ConfigError: `amp` is 'bf16', which this GPU does not compute.
        """
        can = capability is not None and capability >= BF16_CAPABILITY
        if self.amp == "bf16" and capability is not None and not can:
            raise ConfigError(
                "--amp bf16: expected a GPU of compute capability 8.0 or more, got one of "
                f"{'.'.join(map(str, capability))}: choose --amp fp16"
            )
        if self.amp != "auto":
            return self
        return dataclasses.replace(self, amp="bf16" if can else "fp16" if capability else "off")

    @property
    def amp_dtype(self) -> "torch.dtype | None":
        """The dtype of autocast, or None without autocast; `amp` is not 'auto'."""
        assert self.amp != "auto", "filled in by decided"
        return None if self.amp == "off" else torch_dtype(self.amp)

    def autocast(self, device: "torch.device") -> AbstractContextManager[Any]:
        """Return the context of autocast, or a null context if `amp` is 'off'."""
        if self.amp_dtype is None:
            return contextlib.nullcontext()
        import torch

        # A cache would save nothing, because a forward casts each weight once. And a replayed CUDA
        # graph would read stale copies from the cache.
        return torch.autocast(device.type, dtype=self.amp_dtype, cache_enabled=False)

    @property
    def memory_format(self) -> "torch.memory_format":
        import torch

        return torch.channels_last if self.channels_last else torch.contiguous_format


@dataclass(frozen=True, kw_only=True)
class InferenceCompute(Compute):
    """Settings of a step for a model whose weights no longer change."""

    dtype: Dtype = "fp32"
    """Dtype of the weights."""
    fold: bool = True
    """Fold the batch norms of our models into convolutions; outputs change only by rounding."""
    freeze: bool = False
    """With --compile: compile the weights as constants."""

    def decided(self, capability: Capability | None) -> Self:
        """Return a copy in which `amp` is not 'auto'; 16-bit weights need no autocast."""
        if self.amp == "auto" and self.dtype != "fp32":
            return dataclasses.replace(self, amp="off")
        return super().decided(capability)


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Settings):
    """Optimizer, learning rate and gradient accumulation."""

    opt: str = "sgd"
    """Name of the optimizer in timm; sgd is SGD with Nesterov momentum."""
    lr: Positive = 0.1
    """Peak learning rate."""
    lr_batch: Count | None = None
    """Multiply `lr` by (images per optimizer step) / (this number). None: no scaling."""
    momentum: FractionBelow1 = 0.9
    """Momentum, for optimizers with momentum."""
    weight_decay: PositiveOrZero = 1e-4
    """Weight decay of convolution and linear weights; biases and norms do not decay."""
    layer_decay: FractionAbove0 = 1.0
    """Ratio of a block's learning rate to the next block's rate. The head has the full rate.
    1: equal rates."""
    clip_grad: Positive | None = None
    """Clip the norm of all gradients to this number. None: no clipping."""
    accumulate: Count = 1
    """Micro-batches per optimizer step, each of --batch-size images."""


def check_compiled_accumulation(mode: CompileMode, accumulate: int) -> None:
    """Raise `ConfigError` for gradient accumulation with CUDA graphs of `torch.compile`.

    The gradients of a micro-batch lie in the memory of a graph, which the next replay overwrites.
    PyTorch then raises an error or returns wrong sums (pytorch issues 169545 and 96693).
    """
    if accumulate > 1 and mode in CUDA_GRAPH_MODES:
        raise ConfigError(
            f"--accumulate: PyTorch loses gradients between micro-batches with --compile {mode}:"
            " choose --compile default, with --cuda-graph or without"
        )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Settings):
    """Length of the training, and the learning rate schedule."""

    epochs: Count = 300
    """Number of epochs over the training images."""
    lr_schedule: Literal["one-cycle", "cosine", "constant"] = "one-cycle"
    """Learning rate schedule. one-cycle warms up along a cosine; the others warm up linearly."""
    warmup_fraction: Fraction = 0.2
    """Fraction of all optimizer steps that are warm-up, in which the learning rate rises."""
    start_factor: FractionAbove0 = 0.04
    """Learning rate of the first optimizer step, as a fraction of the peak rate."""
    end_factor: FractionAbove0 = 4e-6
    """Learning rate of the last optimizer step, as a fraction of the peak rate."""


@dataclass(frozen=True, kw_only=True)
class EmaConfig(Settings):
    """Exponential moving average (EMA) of weights; evaluation and best.safetensors use it."""

    ema_decay: FractionBelow1 = 0.0
    """Fraction of the EMA that each optimizer step retains. 0: no EMA."""
    ema_warmup: bool = True
    """Increase the decay from 0, so that a short run's EMA depends little on early weights."""


@dataclass(frozen=True, kw_only=True)
class ModelStep(StepInput, EmaConfig, OptimConfig, InferenceCompute, TrainingBuild):
    """All settings that affect the speed and the memory of a training or inference step."""

    def check_applies(self, *, training: bool, model: str, ours: bool) -> None:
        """Raise `InputError` for a setting that differs from its default but has no effect."""
        learning = _names(TrainingBuild, OptimConfig, EmaConfig)
        common = _names(Build, Compute)
        reasons = dict.fromkeys(
            (_names(InferenceCompute) if training else learning) - common,
            f"it is for {'inference' if training else 'training'}",
        )
        if not ours:
            reasons |= dict.fromkeys({*_names(Build), "fold"}, "only our models have one")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in reasons and value not in (field.default, False):
                raise InputError(
                    f"expected no {field.name} for {model}, got {value!r}: {reasons[field.name]}"
                )


def _names(*classes: type[Settings]) -> set[str]:
    return {field.name for cls in classes for field in dataclasses.fields(cls)}
