"""Configuration of a training run: a frozen dataclass for each group of options, and its checks.

Each field is an option of `train.py` by its name: `config.step.optim.lr` is `--lr`. The string
under a field is its help text, and the field's type holds the valid range.
"""

import dataclasses
import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt

from tresnet.environment import __version__
from tresnet.errors import ConfigError, listed
from tresnet.settings import (
    PARTS,
    Augment,
    DataOptions,
    DeviceName,
    EvalTransform,
    ScheduleConfig,
    Sides,
    Step,
    fields,
)
from tresnet.settings.fields import (
    Count,
    CountOrZero,
    Fraction,
    FractionBelow1,
    MemorySize,
    Positive,
    PositiveOrZero,
    Settings,
    Size,
    flatten,
    replace,
)
from tresnet.settings.model import ModelShape

# `--batch-size auto` means the largest batch that fits. `--resume auto` resumes the run that
# `--name` names, or begins it.
AUTO = "auto"
DEFAULT_THRESHOLD = 0.5
BALANCED = "balanced"  # a value of `class_weights`
WEIGHTED_LOSSES = ("cross-entropy", "bce", "asymmetric")  # losses that take `class_weights`
BUILT_IN = ("digits", "digits_multilabel")  # data sets that a run itself writes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageConfig(DataOptions, EvalTransform):
    """Data set of images, its loading, and the crop of evaluation images."""

    data: str | None = None
    """Directory with image folders train/CLASS/ and val/CLASS/, with train.csv and val.csv (header
    image,label; or for several labels per image, image,labels), or with a Hugging Face data set
    (save_to_disk, Parquet, tar files). Or a data set on the hub (hf-hub:USER/NAME), a URL
    (s3://BUCKET/DIR), digits, or digits_multilabel."""
    data_root: str = "data"
    """Directory for the built-in data sets digits and digits_multilabel."""
    workers: CountOrZero = 4
    """DataLoader workers of each process. 0: the process itself loads the images."""
    skip_bad_images: bool = False
    """Skip and count unreadable images. By default an unreadable image stops the run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(ImageConfig):
    """Images of a training run."""

    train_split: str = "train"
    """Name of the split to train on."""
    val_split: str = "val"
    """Name of the split to validate on. In Hugging Face datasets, val also means validation."""
    progressive_sizes: tuple[Size, ...] | None = None
    """Sizes of square training images, used one after the other for equal fractions of the epochs.
    Evaluations use --input-size. None: train at --input-size."""
    sampler: Literal["shuffle", "balanced"] = "shuffle"
    """How an epoch chooses its images. shuffle: each image comes once. balanced: images are drawn,
    each class as often as the others, or for any number of labels by an image's rarest label."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelConfig(Settings):
    """Options of the labels and of the loss."""

    threshold: Fraction = DEFAULT_THRESHOLD
    """Lowest probability at which a label counts as predicted, when F1 is computed. It is saved
    with the weights."""
    loss: Literal["cross-entropy", "one-vs-all", "semantic-softmax", "bce", "asymmetric"] = (
        "cross-entropy"
    )
    """For one label per image: cross-entropy, one-vs-all (a binary cross-entropy for each class,
    arXiv 2110.00476) or semantic-softmax (arXiv 2104.10972). For any number of labels per image,
    from train.csv and val.csv or COCO's JSON: bce or asymmetric (arXiv 2009.14119)."""
    bce_target_thresh: FractionBelow1 | None = None
    """For one-vs-all: targets above this value become 1, all others 0. None: no change."""
    hierarchy: str | None = None
    """For semantic-softmax: a JSON file that maps each class to its parent class."""
    gamma_neg: PositiveOrZero = 4.0
    """For asymmetric: exponent for negative labels. Larger exponents weight easy negatives less."""
    gamma_pos: PositiveOrZero = 1.0
    """For asymmetric: exponent for positive labels. Larger exponents weight easy positives less."""
    prob_margin: FractionBelow1 = 0.05
    """For asymmetric: negative labels below this probability have no loss."""
    class_weights: str | None = None
    """For cross-entropy: weight of each class's images. For bce and asymmetric: weight of each
    class's positive labels. balanced: images / (classes * images of the class), or for any number
    of labels, images without the label / images with it. Or a JSON file, {"class": weight, ...}.
    None: all weights are 1."""

    @property
    def multi(self) -> bool:
        """Whether an image may have any number of labels."""
        return self.loss in ("bce", "asymmetric")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillConfig(Settings):
    """Knowledge distillation: the model also learns from the logits of a teacher."""

    teacher: str | None = None
    """Teacher: a tag of `tresnet list`, a file, hf-hub:USER/NAME, or timm:NAME for a pretrained
    model of timm. None: no teacher."""
    kd_weight: PositiveOrZero = 5.0
    """Weight of the distillation loss; the loss of the labels has weight 1."""
    kd_temperature: Positive = 1.0
    """Softmax temperature of teacher and model in the distillation loss."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineConfig(Settings):
    """The GPUs of a training run."""

    device: DeviceName = "auto"
    sync_bn: bool = False
    """Compute the statistics of batch norm over the images of all GPUs."""
    deterministic: bool = False
    """Use deterministic algorithms, without cuDNN's search for fast ones: slower. PyTorch warns
    about operations without a deterministic algorithm."""
    gpu_memory: MemorySize | None = None
    """GPU memory that --batch-size auto may use, such as 24GiB. None: all free memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """Name, directory, logs and checkpoints of a run."""

    name: str | None = None
    """Name of the run directory, which only --resume may reuse. None: MODEL_DATA_DATE."""
    runs: str = "runs"
    """Directory that holds the run directories."""
    seed: Annotated[int, Ge(0), Lt(2**63)] = 0
    """Seed of random weights, data order and augmentation."""
    eval_interval: Count = 1
    """Number of epochs between evaluations. The last epoch is always evaluated."""
    checkpoint_interval_s: PositiveOrZero = 600.0
    """Seconds between checkpoints within an epoch. Every epoch also ends with a checkpoint."""
    log_interval: Count = 50
    """Optimizer steps between reports of the loss, in the progress bar or as printed lines."""
    skip_bad_steps: CountOrZero = 0
    """Skip at most this many optimizer steps whose loss or gradient is not finite, then stop the
    run. A value above 0 makes every step wait for the device."""
    progress: bool = True
    """Show a progress bar if standard error is a terminal."""
    tensorboard: bool = True
    """Write TensorBoard events if TensorBoard is installed."""
    track: Literal["wandb", "trackio"] | None = None
    """Send the log also to W&B or trackio, whose package must be installed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Settings):
    """The complete configuration of a training run, saved in the run directory as config.json."""

    recipe: str = "paper"
    """Recipe that sets the defaults of all other options: paper, usi, rsb-a2, in21k, finetune,
    multilabel, digits or digits-multilabel."""
    batch_size: Size | Literal["auto"] = 128
    """Images per micro-batch on each process or GPU. auto: the largest number predicted to fit."""
    shape: ModelShape = dataclasses.field(default_factory=ModelShape)
    model: str | None = None
    """Name of the model, such as tresnet_m. None: the model of the weights."""
    weights: str | None = None
    """Initial weights: a tag of `tresnet list`, a file, a directory in timm's layout or
    hf-hub:USER/NAME. None: random weights."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    augment: Augment = dataclasses.field(default_factory=Augment)
    labels: LabelConfig = dataclasses.field(default_factory=LabelConfig)
    distill: DistillConfig = dataclasses.field(default_factory=DistillConfig)
    step: Step = dataclasses.field(default_factory=Step)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    machine: MachineConfig = dataclasses.field(default_factory=MachineConfig)
    run: RunConfig = dataclasses.field(default_factory=RunConfig)

    def trained_parts(self, epoch: int) -> tuple[str, ...] | None:
        """Return the parts of the model that train in `epoch`, counted from 0; None means all."""
        return ("head",) if epoch < self.schedule.freeze_epochs else self.step.optim.train_only


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedData(DataConfig):
    """Options of data whose source, image size and resampling filter are known."""

    data: str = dataclasses.field()
    input_size: Sides = dataclasses.field()
    interpolation: Literal["bilinear", "bicubic"] = dataclasses.field()

    @property
    def sizes(self) -> tuple[Sides, ...]:
        """Sizes of training images in order of use."""
        return self.progressive_sizes or (self.input_size,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Filled(TrainConfig):
    """Configuration of a run in which nothing is open but, with `auto`, the batch size."""

    data: ResolvedData = dataclasses.field()

    @property
    def in_chans(self) -> int:
        return self.shape.in_chans or 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resolved(Filled):
    """The complete configuration of a run, as in its config.json."""

    batch_size: Size = dataclasses.field()


def validate(config: TrainConfig) -> None:
    """If values are wrong, raise a `ConfigError` that lists them; else do so for contradictions."""
    try:
        fields.check(config)
        problems = _contradictions(config)
    except ConfigError as error:
        problems = [str(error)]
    if problems:
        raise ConfigError("the configuration is invalid:\n  " + "\n  ".join(problems))


def _contradictions(config: TrainConfig) -> list[str]:
    weights, data, labels, augment = config.weights, config.data, config.labels, config.augment
    machine, build, epochs = config.machine, config.step.build, config.schedule.epochs
    teacher, track, name = config.distill.teacher, config.run.track, config.run.name or ""
    semantic, sizes = labels.loss == "semantic-softmax", data.progressive_sizes or ()
    odd = config.batch_size if config.batch_size != AUTO and config.batch_size % 2 else None
    parts, frozen = config.step.optim.train_only or (), config.schedule.freeze_epochs
    unknown = sorted(set(parts) - set(PARTS))
    no_directory = os.path.basename(name) != name or name in (".", "..")
    rows: list[tuple[object, str]] = [
        (data.data is None,
         "data: say what to train on: a directory with train/ and val/, or digits"),
        (config.model is None and weights is None,
         "model: say which model to train, or start from --weights"),
        (config.recipe == "finetune" and weights is None,
         "weights: the recipe finetune needs weights to start from: a tag or a file"),
        (config.recipe == "usi" and teacher is None,
         "teacher: the recipe usi needs a teacher: a tag, a file or timm:NAME"),
        (semantic and labels.hierarchy is None,
         'hierarchy: --loss semantic-softmax needs a JSON file, {"class": "its parent class"}'),
        (semantic and augment.mixes,
         "loss semantic-softmax needs one class per image: expected no --mixup or --cutmix"),
        (labels.class_weights is not None and labels.loss not in WEIGHTED_LOSSES,
         f"class-weights: expected --loss {listed(WEIGHTED_LOSSES)}, got {labels.loss}, whose terms"
         " are not those of one class"),
        (teacher is not None and (semantic or labels.multi),
         f"teacher: expected --loss cross-entropy or one-vs-all, got {labels.loss}"),
        (augment.mixes and odd,
         f"batch-size: mixup and cutmix pair images, expected an even number, got {odd}"),
        (labels.multi and (augment.mixes or augment.label_smoothing),
         f"loss {labels.loss} takes labels as they are: expected no --mixup, --cutmix or"
         " --label-smoothing"),
        (unknown,
         f"train-only: expected parts of the model ({listed(PARTS)}), got {listed(unknown)}"),
        (frozen and parts and not unknown and "head" not in parts,
         "freeze-epochs trains the head first: expected head among the parts of --train-only, got"
         f" {listed(parts)}"),
        (frozen >= epochs,
         f"freeze-epochs: expected fewer than the {epochs} epochs of --epochs, got {frozen}: or"
         " choose --train-only head"),
        (len(sizes) > epochs,
         f"progressive-sizes: expected at most as many sizes as the {epochs} epochs, got {sizes}"),
        (augment.mix_off_epochs > epochs,
         f"mix-off-epochs: expected at most the {epochs} epochs of --epochs, got"
         f" {augment.mix_off_epochs}"),
        (track is not None and find_spec(track) is None,
         f"track {track}: expected the package {track}, got none: pip install {track}"),
        (no_directory or len(name.encode(errors="replace")) > 255,
         f"name: expected a directory name without a path, of at most 255 bytes, got {name!r:.80}"),
        *((not text.isprintable(), f"{option}: expected printable UTF-8 text, got {text!a}")
          for option, text in (("runs", config.run.runs), ("name", name))),  # for safetensors
        (build.recompute == "none" and build.norm != "abn",
         f"recompute none: expected --norm abn, got {build.norm}"),
        (machine.sync_bn and build.impl == "triton",
         "sync-bn: PyTorch's synchronised norms run without the kernels, got --impl triton"),
        (machine.sync_bn and build.norm == "inplace_abn",
         "sync-bn: only --norm abn and batchnorm can be synchronised, got --norm inplace_abn"),
    ]  # fmt: skip
    return [f"--{message}" for holds, message in rows if holds]


def to_json(config: Resolved) -> str:
    """Return the configuration and this package's version as indented JSON text."""
    values = dataclasses.asdict(config)
    step, data = values["step"], values["data"]
    weights = {name: values[name] for name in ("model", "weights")}
    sizes = data.pop("progressive_sizes")
    groups = {
        "recipe": config.recipe,
        "model": values["shape"] | step["build"] | weights,
        "data": {**data, "batch_size": config.batch_size, "progressive_sizes": sizes},
        **{name: values[name] for name in ("augment", "labels", "distill")},
        "optim": step["optim"],
        "schedule": values["schedule"],
        "ema": step["ema"],
        "compute": step["compute"] | values["machine"],
        "run": values["run"],
    }
    return json.dumps({"tresnet": __version__, **groups}, indent=2) + "\n"


def load(path: Path) -> TrainConfig:
    """Read a config.json, or raise `ConfigError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"no readable config.json of a run at {path}: {error}") from error
    return from_json(text, str(path))


def from_json(text: str, source: str) -> TrainConfig:
    """Parse text that `to_json` wrote; a ConfigError names `source`."""
    settings: dict[str, Any] = {}
    try:
        for name, value in json.loads(text).items():  # accepts lone surrogates, unlike pydantic
            settings |= value if isinstance(value, dict) else {name: value}
    except (AttributeError, RecursionError, ValueError) as error:
        reason = error if isinstance(error, ValueError) else "expected one object of values"
        raise ConfigError(f"{source} is not the JSON of a configuration: {reason}") from error
    writer = f"tresnet {settings.pop('tresnet', 'of an unknown version')}"
    names = flatten(TrainConfig()).keys()
    if unknown := [fields.unknown("setting", name, names) for name in settings.keys() - names]:
        raise ConfigError(
            f"{source}, written by {writer}: {'; '.join(sorted(unknown))}: correct or remove them,"
            f" or go on with {writer}, as this is tresnet {__version__}"
        )
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    return fields.check(replace(TrainConfig(), **values), spell=lambda name: f"{source}: {name}")
