"""Settings of a model's build, of its step and of its images, each declared once.

The training configuration, `eval.py`, benchmarks and predictions of memory are made of these
classes. The text under a field is its help on the command line, and its type holds its range. This
module does not import PyTorch, so that `--help` is quick.
"""

import contextlib
import dataclasses
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Le

from tresnet.errors import InputError
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

if TYPE_CHECKING:
    import torch

Amp = Literal["off", "bf16", "fp16"]
CompileMode = Literal[
    "none", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
]
Dtype = Literal["fp32", "bf16", "fp16"]
Impl = Literal["auto", "triton", "reference"]
Input = Literal["float", "uint8"]
Sides = Size | tuple[Size, Size]  # of a square, or height and width, in pixels
Recompute = Literal["none", "activations", "outputs"]


def sides(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return height and width of an `input_size`."""
    return (size, size) if isinstance(size, int) else size


def torch_dtype(name: Dtype) -> "torch.dtype":
    """Return the dtype that a setting names."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


# -- a model's build --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Build(Settings):
    """Implementation of a model; its function and its checkpoints do not depend on these."""

    norm: Literal["abn", "batchnorm", "inplace_abn"] = "abn"
    """Implementation of batch norm + activation."""
    impl: Impl = "auto"
    """Implementation of the norms and what follows them: Triton kernels, or plain operators."""
    jit: bool = False
    """Use the scripted helper functions."""


@dataclass(frozen=True, kw_only=True)
class TrainingBuild(Build):
    """Build of a model that is trained."""

    recompute: Recompute = "activations"
    """Tensors of norm abn that backward recomputes. none is the least work. outputs (also those
    of every second block, on a GPU and without --compile) is the least memory."""
    grad_checkpointing: bool = False
    """Run the forward of each block again in backward, to save memory."""

    @property
    def build(self) -> dict[str, Any]:
        """Arguments of `tresnet.create`; `grad_checkpointing` is switched on afterwards."""
        return {**self.values(Build), "recompute": self.recompute}


@dataclass(frozen=True, kw_only=True)
class ModelShape(Settings):
    """Options that decide a model's parameters and function, beside its variant."""

    head: str | None = None
    """Kind of classifier: linear, group_attention, ml_decoder. None: the weights', else linear."""
    head_groups: tuple[int, ...] | None = None
    """Classes of each group of the head group_attention. None: 12 groups of about equal size."""
    head_channels: int | None = None
    """Channels of each group of group_attention (None: 512) or of ml_decoder (None: 768)."""
    width_factor: Positive | None = None
    """Multiply the channels. None: the variant's own."""
    layers: tuple[Count, Count, Count, Count] | None = None
    """Blocks in each stage. None: the variant's own."""
    block_size: Count | None = None
    """Side of the space-to-depth blocks: 2 suits small images. None: the variant's own."""
    drop_rate: FractionBelow1 = 0.0
    """Dropout before the classifier."""
    drop_path_rate: FractionBelow1 = 0.0
    """Stochastic depth of the last block; earlier blocks get less."""


# -- its images -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ImageSize(Settings):
    """The size of a model's images."""

    input_size: Sides | None = None
    """Height and width of the input in pixels, or one number for both. None: the model's own."""


@dataclass(frozen=True, kw_only=True)
class EvalTransform(ImageSize):
    """Resizing and cropping of an image to the size that a model is tested at."""

    crop_pct: FractionAbove0 | None = None
    """Fraction of the resized image that evaluation keeps. None: the model's own."""
    crop_mode: Literal["center", "squash", "border"] | None = None
    """How evaluation crops. center: keep the aspect ratio and cut the middle out. squash: resize to
    the input size. border: keep the aspect ratio and all of the image, between black borders. None:
    the model's own."""
    interpolation: Literal["bilinear", "bicubic"] | None = None
    """Resampling filter. None: the model's own."""


@dataclass(frozen=True, kw_only=True)
class ShardSettings(Settings):
    """Conversion of an image before it is written into a shard.

    An image that is no larger than requested keeps its bytes. Others are resized (Lanczos) and
    become JPEGs, or all of them are kept as pixels. Only one of the two sides is limited.
    """

    max_side: Count | None = None
    """Make images smaller until the longer side has at most so many pixels; 500 keeps accuracy."""
    short_side: Count | None = None
    """Make images smaller until the shorter side has at most so many pixels; 256 is fastest."""
    quality: Annotated[int, Ge(1), Le(100)] = 90
    """JPEG quality of the images that are resized."""
    pixels: bool = False
    """Keep pixels instead of JPEGs: nothing to decode, on about ten times the space."""
    images_per_shard: Count = 8192
    """Images in a file."""


@dataclass(frozen=True, kw_only=True)
class StepInput(ImageSize):
    """The images that reach a step."""

    input: Input = "float"
    """float: images in [0, 1]. uint8: bytes, which the step divides by 255; our channels-last stem
    reads the bytes directly."""


# -- its step ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Compute(Settings):
    """Precision, memory format and compiler of a step."""

    amp: Amp = "off"
    """Autocast to 16 bits; fp16 scales the loss in training."""
    channels_last: bool = False
    """Keep images and weights in channels-last memory."""
    compile: CompileMode = "none"
    """Mode of torch.compile. none: run eagerly."""
    cuda_graph: Literal["off", "on", "auto"] = "auto"
    """Replay batches of frequent shapes as a CUDA graph, which saves CPU time. auto: on for models
    that are not compiled, on one GPU."""

    @property
    def amp_dtype(self) -> "torch.dtype | None":
        """The dtype of autocast; None for no autocast."""
        return None if self.amp == "off" else torch_dtype(self.amp)

    def autocast(self, device: "torch.device") -> AbstractContextManager[Any]:
        """Return the context of autocast, or one that does nothing."""
        if self.amp_dtype is None:
            return contextlib.nullcontext()
        import torch

        # Each weight is cast once per forward anyway, and copies cached across a captured graph
        # would be stale.
        return torch.autocast(device.type, dtype=self.amp_dtype, cache_enabled=False)

    @property
    def memory_format(self) -> "torch.memory_format":
        """The memory format of images and weights."""
        import torch

        return torch.channels_last if self.channels_last else torch.contiguous_format


@dataclass(frozen=True, kw_only=True)
class InferenceCompute(Compute):
    """Precision, memory format and compiler for a model whose weights no longer change."""

    dtype: Dtype = "fp32"
    """Type of the weights."""
    fold: bool = True
    """Fold each batch norm of our models into the convolution before it: the same outputs up to
    rounding."""
    freeze: bool = False
    """With --compile: compile the weights in as constants."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Settings):
    """Optimizer, learning rate and gradient accumulation."""

    opt: str = "sgd"
    """Optimizer by timm's name; sgd is SGD with Nesterov momentum."""
    lr: Positive = 0.1
    """Highest learning rate."""
    lr_batch: Count | None = None
    """Images per optimizer step for which `lr` is given; it scales linearly. None: no scaling."""
    momentum: FractionBelow1 = 0.9
    """Momentum, where the optimizer has one."""
    weight_decay: PositiveOrZero = 1e-4
    """Weight decay of convolution and linear weights; biases and norms have none."""
    layer_decay: FractionAbove0 = 1.0
    """Learning rate of each block as a fraction of the next one's; the head has the full rate. 1:
    the same rate for all."""
    clip_grad: Positive | None = None
    """Largest norm of the gradients. None: no limit."""
    accumulate: Count = 1
    """Micro-batches per optimizer step, each of --batch-size images."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Settings):
    """Length of the training, and the learning rate schedule."""

    epochs: Count = 300
    """Number of epochs over the training images."""
    lr_schedule: Literal["one-cycle", "cosine", "constant"] = "one-cycle"
    """Schedule after the warm-up; one-cycle warms up along a cosine, the others linearly."""
    warmup_fraction: Fraction = 0.2
    """Fraction of all optimizer steps in which the learning rate rises."""
    start_factor: FractionAbove0 = 0.04
    """First learning rate, as a fraction of the highest."""
    end_factor: FractionAbove0 = 4e-6
    """Last learning rate, as a fraction of the highest."""


@dataclass(frozen=True, kw_only=True)
class EmaConfig(Settings):
    """Exponential moving average (EMA) of the weights, which is evaluated and kept as best."""

    ema_decay: FractionBelow1 = 0.0
    """Fraction of the EMA kept at each optimizer step. 0: no EMA."""
    ema_warmup: bool = True
    """Let the decay grow from 0, so that the first weights have little influence in a short run."""


@dataclass(frozen=True, kw_only=True)
class ModelStep(StepInput, EmaConfig, OptimConfig, InferenceCompute, TrainingBuild):
    """All settings that affect the speed and the memory of a training or inference step."""

    def check_applies(self, *, training: bool, model: str, ours: bool) -> None:
        """Raise `InputError` for a setting that is not at its default and has no effect."""
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
