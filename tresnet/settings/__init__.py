"""Settings of models, images, and training and inference steps, each declared once.

The configurations of training, evaluation, benchmarks and memory predictions are built from these
classes. The text under a field is the option's help on the command line, and the field's type holds
the allowed range. Importing this module does not import PyTorch, so that `--help` is quick.
"""

import contextlib
import dataclasses
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from annotated_types import MinLen
from typing_extensions import Doc

from tresnet.errors import ConfigError, InputError
from tresnet.settings.fields import (
    Ascending,
    Count,
    CountOrZero,
    Fraction,
    FractionAbove0,
    FractionBelow1,
    Positive,
    PositiveOrZero,
    Settings,
    Size,
    changed,
)
from tresnet.settings.model import Norm

if TYPE_CHECKING:
    import torch

Amp = Literal["auto", "off", "bf16", "fp16"]
CompileMode = Literal[
    "none", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
]
Dtype = Literal["fp32", "bf16", "fp16"]
Impl = Literal["auto", "triton", "plain"]
Sides = Size | tuple[Size, Size]  # side of a square, or height and width, in pixels
Threshold = float | tuple[float, ...]  # lowest probability of a label: for all, or for each class
Recompute = Literal["none", "activations"]
Capability = tuple[int, int]  # compute capability of a GPU, such as (8, 0)
PARTS = ("stem", "layer1", "layer2", "layer3", "layer4", "head")  # parts of a TResNet
BF16_CAPABILITY: Capability = (8, 0)  # older GPUs only emulate bf16

# Types, with their help, of options that several commands have.
InputSize = Annotated[
    Sides | None,
    Doc("Height and width of images in pixels, or one number for both. None: the model's default."),
]
Input = Annotated[
    Literal["float", "uint8"],
    Doc(
        "Type of the images. float: values in [0, 1]. uint8: bytes, which the step divides by 255."
        " In channels-last format, one Triton kernel does the division and space-to-depth."
    ),
]
ClassMap = Annotated[
    str | None,
    Doc(
        "File with a name of a class in each line, in the order of the model's outputs, as timm's."
        " It names labels that are numbers, and outputs of weights without names. None: the names"
        " of the weights and data."
    ),
]
MaxImagePixels = Annotated[
    Count | None,
    Doc(
        "Largest number of pixels of an image, against decompression bombs; more are an error."
        " None: 178956970, twice the number from which Pillow warns."
    ),
]
WeightsName = Annotated[
    str,
    Doc("Weights: a tag of `tresnet list`, a file, a folder in timm's layout or hf-hub:USER/NAME."),
]
BatchSize = Annotated[Size, Doc("Number of images in a batch.")]
DeviceName = Annotated[
    str, Doc("cpu, cuda, cuda:N or auto. auto: a GPU if one is available, otherwise the CPU.")
]


def sides(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return (height, width) of an `input_size`; an int is the side of a square."""
    return (size, size) if isinstance(size, int) else size


def torch_dtype(name: Dtype) -> "torch.dtype":
    """Return PyTorch's dtype for a setting such as 'bf16'."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


# -- implementation of a model ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Build(Settings):
    """Implementation of a model: no effect on checkpoints, and only rounding effects on outputs."""

    norm: Norm = "abn"
    """Implementation of batch norm followed by leaky ReLU."""
    jit: bool = False
    """Run space-to-depth, blurs and global average pools in TorchScript."""
    impl: Impl = "auto"
    """Implementation of the operations between convolutions. triton: fused Triton kernels. plain:
    PyTorch's operators. auto: triton if the GPU can run the kernels, otherwise plain."""


@dataclass(frozen=True, kw_only=True)
class TrainingBuild(Build):
    """Implementation of a model for training."""

    recompute: Recompute | None = "activations"
    """Tensors that backward on a GPU recomputes instead of saving them, with Triton kernels or
    --compile. none: no tensors. activations: outputs of norms, blurs and squeeze-and-excitation.
    None: activations in models of this package, none in others."""
    grad_checkpointing: bool = False
    """Run the forward of each block again in backward, to save memory."""

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `tresnet.create`; `grad_checkpointing` is none of them."""
        values = {k: v for k, v in vars(self).items() if k != "grad_checkpointing"}
        return {k: v for k, v in values.items() if v is not None}


# -- images -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EvalTransform(Settings):
    """Resizing and cropping of images for evaluation."""

    input_size: InputSize = None
    crop_pct: FractionAbove0 | None = None
    """Fraction of each side of the resized image that the crop keeps. None: the model's default."""
    crop_mode: Literal["center", "squash", "border"] | None = None
    """How evaluation crops. center: keep the aspect ratio and cut off the edges. squash: change the
    aspect ratio to the input's. border: keep the aspect ratio and add black borders. None: the
    model's default."""
    interpolation: Literal["bilinear", "bicubic"] | None = None
    """Resampling filter. None: the model's default."""


CROP = ("crop_pct", "crop_mode", "interpolation")


@dataclass(frozen=True, kw_only=True)
class Augment(Settings):
    """Augmentation of training images and labels, applied in the order of the fields."""

    random_crop: bool = True
    """Crop a random part of the image and resize the crop. If false, resize the complete image."""
    crop_scale: Annotated[tuple[FractionAbove0, FractionAbove0], Ascending] = (0.08, 1.0)
    """Smallest and largest fraction of the image's area in a random crop."""
    crop_ratio: Annotated[tuple[Positive, Positive], Ascending] = (3 / 4, 4 / 3)
    """Smallest and largest width / height of a random crop."""
    hflip: Fraction = 0.5
    """Probability of a horizontal flip."""
    affine_degrees: PositiveOrZero = 0.0
    """Largest random rotation in degrees, clockwise or anticlockwise."""
    affine_translate: Fraction = 0.0
    """Largest random shift, as a fraction of the image's width and height."""
    affine_scale: Annotated[tuple[Positive, Positive], Ascending] = (1.0, 1.0)
    """Smallest and largest factor of the random zoom."""
    affine_shear: PositiveOrZero = 0.0
    """Largest random horizontal shear in degrees, to the left or right."""
    auto_augment: str | None = None
    """Augmentation policy of timm, such as original, v0 or rand-m9-mstd0.5. None: no policy."""
    cutout_prob: Fraction = 0.0
    """Probability that cutout blackens a random rectangle of the image."""
    cutout_area: Annotated[tuple[FractionAbove0, FractionAbove0], Ascending] = (0.25, 0.25)
    """Smallest and largest fraction of the image's area that cutout blackens."""
    cutout_min_aspect: FractionAbove0 = 1.0
    """Smallest height / width of cutout's rectangle; the largest is its inverse. 1: a square."""
    aug_repeats: Count = 1
    """Number of augmented copies of each image per epoch (repeated augmentation, arXiv 1902.05509).
    The epoch keeps its length, so an epoch has fewer different images."""
    reprob: Fraction = 0.0
    """Probability that random erasing overwrites parts of the image (arXiv 1708.04896)."""
    remode: Literal["const", "rand", "pixel"] = "pixel"
    """Fill of random erasing. const: black. rand: one random colour for each rectangle. pixel: a
    random colour for each pixel. Colours are normal with ImageNet's mean and deviation."""
    recount: Count = 1
    """Largest number of rectangles that random erasing overwrites in an image."""
    mixup: PositiveOrZero = 0.0
    """Alpha of mixup. 0: no mixup."""
    cutmix: PositiveOrZero = 0.0
    """Alpha of cutmix. 0: no cutmix."""
    mix_prob: Fraction = 1.0
    """Probability that a batch is mixed, if mixup or cutmix is on."""
    mix_off_epochs: CountOrZero = 0
    """Number of epochs without mixup and cutmix at the end of the run."""
    label_smoothing: FractionBelow1 = 0.0
    """Fraction of each target that is distributed evenly over all classes."""

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0


@dataclass(frozen=True, kw_only=True)
class DataOptions(Settings):
    """Options for reading the images and labels of a data set."""

    class_map: ClassMap = None
    max_image_pixels: MaxImagePixels = None
    data_config: str | None = None
    """Configuration (subset) of a Hugging Face data set. None: the only configuration."""
    image_column: str | None = None
    """Column of images in a Hugging Face data set. None: the only column of type Image."""
    label_column: str | None = None
    """Column of labels in a Hugging Face data set. None: the only column of type ClassLabel,
    lists of ClassLabel, or numbers or texts named label, labels or cls."""
    label_separator: str | None = None
    """Text between the names in the column `labels` of a CSV file. None: a semicolon."""
    outside_paths: bool = False
    """Read images outside of the data's directory if its files of labels name them."""


@dataclass(frozen=True)
class ExportOptions(DataOptions):
    """Settings of an export, and of the images that the exported model reads."""

    format: Literal["onnx", "pt2", "aoti", "openvino", "tensorrt"]
    """Format of the output. onnx: for ONNX Runtime and others. pt2: an ExportedProgram. aoti: a
    library compiled by AOTInductor for machines like this one. openvino: for Intel's CPUs.
    tensorrt: a plan for GPUs like this one."""
    dynamic_size: bool = False
    """For onnx and pt2: accept other heights and widths too. The batch size is always dynamic."""
    channels_last: bool = False
    """For aoti: compile for images in channels-last memory format."""
    int8: bool = False
    """For onnx and pt2: use 8-bit weights and activations, with ranges measured on --data."""
    fp16: bool = False
    """For onnx and tensorrt: use 16-bit weights and activations. Logits stay in 32 bits."""
    batch_size: Count | None = None
    """For tensorrt: number of images for which the plan is tuned; it takes fewer too, and up to 32.
    None: 1."""
    data: str | None = None
    """Data with splits train and val: a directory of class folders or Hugging Face datasets,
    hf-hub:USER/NAME or a URL. The export fails if top-1 on val falls by over 0.01 percentage points
    (0.3 with --int8). --int8 measures ranges on train."""
    input_size: InputSize = None
    input: Input = "float"
    overwrite: bool = False
    """Replace the output if it exists."""


# -- training and inference steps -------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Compute(Settings):
    """Precision, memory format, compilation and CUDA graphs of a training or inference step."""

    amp: Amp = "auto"
    """16-bit type of autocast; in training, fp16 also scales the loss. auto: bf16 on a GPU of
    compute capability 8.0 or more, fp16 on an older GPU, off on a CPU."""
    channels_last: bool = True
    """Store images and weights in channels-last memory format."""
    compile: CompileMode = "none"
    """Mode of torch.compile. none: run eagerly."""
    cuda_graph: Literal["off", "on", "auto"] = "auto"
    """Capture and replay a CUDA graph for each frequent batch shape, which saves CPU time. auto: on
    for a GPU without --compile, --grad-checkpointing and --sync-bn. on: also for --compile default.
    If a capture fails, batches run eagerly, and the log says why. In training on several GPUs, off
    is DistributedDataParallel; otherwise gradients are exchanged after backward."""

    def decided(self, capability: Capability | None) -> Self:
        """Return settings with the `amp` that 'auto' means for `capability`; None means a CPU.

        Raises:
            ConfigError: `amp` is 'bf16', but the GPU's compute capability is below 8.0.
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

    def autocast(self, device: "torch.device") -> AbstractContextManager[Any]:
        """Return a context of `torch.autocast`, which is disabled if `amp` is 'off'."""
        import torch

        assert self.amp != "auto", "filled in by decided"
        if self.amp == "off":  # off also in the caller's autocast
            on = torch.is_autocast_enabled(device.type)
            return torch.autocast(device.type, enabled=False) if on else contextlib.nullcontext()
        # autocast's cache would save nothing, because a forward casts a weight only once. In it, a
        # replayed CUDA graph would read outdated weights.
        return torch.autocast(device.type, dtype=torch_dtype(self.amp), cache_enabled=False)

    @property
    def memory_format(self) -> "torch.memory_format":
        import torch

        return torch.channels_last if self.channels_last else torch.contiguous_format


@dataclass(frozen=True, kw_only=True)
class InferenceCompute(Compute):
    """Precision, folding and compilation of an inference step."""

    dtype: Dtype = "fp32"
    """Dtype of the weights."""
    fold: bool = True
    """Fold a TResNet's batch norms into its convolutions; outputs change only by rounding."""
    freeze: bool = False
    """With --compile: compile the weights as constants."""

    def decided(self, capability: Capability | None) -> Self:
        """Return `Compute`'s decision, except that `amp` 'auto' is 'off' with 16-bit weights."""
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
    """`lr` is multiplied by (images per optimizer step) / (this number). None: no scaling."""
    momentum: FractionBelow1 = 0.9
    """Momentum, for optimizers with momentum."""
    weight_decay: PositiveOrZero = 1e-4
    """Weight decay of convolution and linear weights; biases and norms do not decay."""
    layer_decay: FractionAbove0 = 1.0
    """Ratio of a block's learning rate to the next block's rate; the head has the full rate."""
    clip_grad: Positive | None = None
    """Maximum norm of all gradients together, for clipping. None: no clipping."""
    accumulate: Count = 1
    """Micro-batches per optimizer step, each of --batch-size images."""
    train_only: Annotated[tuple[str, ...], MinLen(1)] | None = None
    """Parts to train, such as layer4 head: stem, layer1, ..., head. The others are frozen: they run
    as in evaluation, and keep their weights and statistics. None: all parts."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Settings):
    """Length of the training, and the learning rate schedule."""

    epochs: Count = 300
    """Number of epochs."""
    lr_schedule: Literal["one-cycle", "cosine", "constant"] = "one-cycle"
    """Learning rate schedule. one-cycle warms up along a cosine; the others warm up linearly."""
    warmup_fraction: Fraction = 0.2
    """Length of the warm-up, in which the learning rate rises, as a fraction of all steps."""
    start_factor: FractionAbove0 = 0.04
    """Learning rate of the first optimizer step, as a fraction of the peak rate."""
    end_factor: FractionAbove0 = 4e-6
    """Learning rate of the last optimizer step, as a fraction of the peak rate."""
    freeze_epochs: CountOrZero = 0
    """Number of epochs at the beginning in which only the head trains, at the rates of the same
    schedule. Later the parts of --train-only train, or all."""


@dataclass(frozen=True, kw_only=True)
class EmaConfig(Settings):
    """Exponential moving average (EMA) of weights, used for evaluation and best.safetensors."""

    ema_decay: FractionBelow1 = 0.0
    """Fraction of the EMA that each optimizer step retains. 0: no EMA."""
    ema_warmup: bool = True
    """Increase the decay from 0, so that a short run's EMA depends little on early weights."""


@dataclass(frozen=True, kw_only=True)
class Step(Settings):
    """All settings that affect the speed and memory use of a training step."""

    build: TrainingBuild = field(default_factory=TrainingBuild)
    compute: Compute = field(default_factory=Compute)
    optim: OptimConfig = field(default_factory=OptimConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)


@dataclass(frozen=True, kw_only=True)
class ModelStep(Step):
    """All settings that affect the speed and memory use of a training or inference step."""

    compute: InferenceCompute = field(default_factory=InferenceCompute)

    def check_used(self, default: "ModelStep", *, training: bool, model: str, ours: bool) -> None:
        """Raise `InputError` if a setting differs from `default` and has no effect on `model`.

        `ours` says whether `model` is a TResNet of this package.
        """
        reasons: dict[str, str]
        if training:
            reasons = dict.fromkeys(("dtype", "fold", "freeze"), "it is for inference")
        else:
            names = *vars(self.optim), *vars(self.ema), "recompute", "grad_checkpointing"
            reasons = dict.fromkeys(names, "it is for training")
        if not ours:
            reasons |= dict.fromkeys((*vars(Build()), "fold"), "only our models have one")
        for name, value in changed(self, default).items():
            if name in reasons and value:
                raise InputError(f"expected no {name} for {model}, got {value!r}: {reasons[name]}")
