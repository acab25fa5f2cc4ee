"""Configuration of a training run: frozen dataclasses, one per concern.

Every field is an option of `train.py`. Names are unique over all groups, so
`config.schedule.epochs` is `--epochs`. The text under a field is its help on the command line, and
its type holds its range.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt

from tresnet.data.transforms import Augment
from tresnet.errors import ConfigError
from tresnet.settings import (
    Compute,
    EmaConfig,
    EvalTransform,
    ModelShape,
    OptimConfig,
    ScheduleConfig,
    Sides,
    TrainingBuild,
    fields,
)
from tresnet.settings.fields import (
    Count,
    CountOrZero,
    Fraction,
    FractionBelow1,
    Positive,
    PositiveOrZero,
    Settings,
    Size,
)

# Value of `batch_size` for the largest batch that fits.
AUTO = "auto"
WRITTEN = ("digits", "digits_multilabel")  # data sets that are written where they are missing


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkConfig(TrainingBuild, ModelShape):
    """The model and its initial weights."""

    model: str | None = None
    """Variant, such as tresnet_m. None: the one that the weights name."""
    weights: str | None = None
    """Start from these weights: a tag of `tresnet list`, a file, a directory in timm's layout or
    hf-hub:USER/NAME. None: random weights."""
    new_head: bool = False
    """Leave the head of the weights out and start a new one for the classes of the data."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageConfig(EvalTransform):
    """The images of a data set, their loading and their test crop."""

    data: str | None = None
    """Directory with train/CLASS/ and val/CLASS/ image folders, shards of `tresnet shard`, or
    train.csv and val.csv for several labels per image; or `digits` or `digits_multilabel`."""
    data_root: str = "data"
    """Directory in which the digits are written."""
    workers: CountOrZero = 4
    """Processes that load images, per process that computes. 0: that process itself."""
    skip_bad_images: bool = False
    """Count unreadable images and go on, instead of stopping."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(ImageConfig):
    """Images and batches of a training run."""

    batch_size: Size | Literal["auto"] = 128
    """Images per process (per GPU) and forward pass. auto: the largest predicted to fit the GPU."""
    progressive_sizes: tuple[Size, ...] | None = None
    """Train at these square sizes one after the other, each for an equal fraction of the epochs,
    and test at --input-size. None: train at --input-size."""

    @property
    def resolved_batch_size(self) -> int:
        """`batch_size` of a resolved configuration, in which it is a number."""
        assert isinstance(self.batch_size, int), "filled in by batch_size.resolve"
        return self.batch_size

    @property
    def resolved_input_size(self) -> Sides:
        """`input_size` of a resolved configuration, which is filled in."""
        assert self.input_size is not None, "filled in by resolve"
        return self.input_size

    @property
    def sizes(self) -> tuple[Sides, ...]:
        """Sizes of training images, in their order, of a resolved configuration."""
        return self.progressive_sizes or (self.resolved_input_size,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AugmentConfig(Augment):
    """Augmentation of training images and labels, in this order."""

    aug_repeats: Count = 1
    """Augmented copies of each image per epoch (repeated augmentation, arXiv 1902.05509). An epoch
    keeps its length, so it has fewer different images."""
    mixup: PositiveOrZero = 0.0
    """Alpha of mixup. 0: no mixup."""
    cutmix: PositiveOrZero = 0.0
    """Alpha of cutmix. 0: no cutmix."""
    mix_prob: Fraction = 1.0
    """Probability that a batch is mixed, if mixup or cutmix is on."""
    mix_off_epochs: CountOrZero = 0
    """Number of last epochs without mixup and cutmix."""
    label_smoothing: FractionBelow1 = 0.0
    """Probability distributed evenly over all classes."""

    @property
    def mixes(self) -> bool:
        """Whether images and labels are mixed."""
        return self.mixup > 0 or self.cutmix > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreConfig(Settings):
    """The metrics of images with any number of labels."""

    threshold: Fraction = 0.5
    """Probability from which a label counts as predicted, for F1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceConfig(Settings):
    """The device of a run."""

    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: a GPU if there is one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelConfig(ScoreConfig):
    """Labels, one or several per image, and the loss."""

    loss: Literal["cross-entropy", "one-vs-all", "semantic-softmax", "bce", "asymmetric"] = (
        "cross-entropy"
    )
    """For one label an image: cross-entropy, one-vs-all (a binary cross-entropy for each class,
    arXiv 2110.00476) or semantic-softmax (arXiv 2104.10972). For any number of them, listed in
    train.csv and val.csv or in COCO's JSON: bce or asymmetric (arXiv 2009.14119)."""
    bce_target_thresh: FractionBelow1 | None = None
    """One-vs-all: targets of mixed labels above this become 1, others 0. None: unchanged."""
    hierarchy: str | None = None
    """Semantic softmax: a JSON file, {"class": "the class above it"}."""
    gamma_neg: PositiveOrZero = 4.0
    """Asymmetric loss: focusing exponent of negatives; higher reduces easy ones more."""
    gamma_pos: PositiveOrZero = 1.0
    """Asymmetric loss: focusing exponent of positives; higher reduces easy ones more."""
    prob_margin: FractionBelow1 = 0.05
    """Asymmetric loss: negatives below this probability have no loss."""

    @property
    def multi(self) -> bool:
        """Whether an image may have any number of labels."""
        return self.loss in ("bce", "asymmetric")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillConfig(Settings):
    """Knowledge distillation from a teacher, beside the labels."""

    teacher: str | None = None
    """Weights of the teacher: a tag of `tresnet list`, a file or hf-hub:USER/NAME, or timm:NAME for
    timm's model with its pretrained weights. None: no teacher."""
    kd_weight: PositiveOrZero = 5.0
    """Weight of the distillation loss; that of the labels is 1."""
    kd_temperature: Positive = 1.0
    """Softmax temperature of teacher and model in the distillation loss."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeConfig(DeviceConfig, Compute):
    """Device, precision and memory format."""

    sync_bn: bool = False
    """Compute batch statistics over the images of all GPUs."""
    gpu_memory: str | None = None
    """Memory for --batch-size auto, such as 24GiB. None: the free memory of the GPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """Name, directory, logs and checkpoints of a run."""

    name: str | None = None
    """Name of the run directory. It must not exist, unless --resume. None: model, data and date."""
    runs: str = "runs"
    """Directory that holds the run directories."""
    seed: Annotated[int, Ge(0), Lt(2**63)] = 0
    """Seed of weights, data order and augmentation."""
    eval_interval: Count = 1
    """Epochs between evaluations; the last epoch always has one."""
    checkpoint_interval_s: PositiveOrZero = 600.0
    """Seconds between checkpoints within an epoch; each epoch ends with one anyway."""
    log_interval: Count = 50
    """Optimizer steps between readings of the loss, and between lines without a progress bar."""
    skip_bad_steps: CountOrZero = 0
    """Largest number of optimizer steps to skip as their loss or gradient is not finite; then the
    run stops. More than 0 waits for the device in every step."""
    progress: bool = True
    """Show a progress bar, if the output is a terminal."""
    tensorboard: bool = True
    """Write TensorBoard events, if it is installed."""
    track: Literal["wandb", "trackio"] | None = None
    """Also send the log to W&B or trackio, which must be installed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Settings):
    """The complete configuration of a training run; saved with it as config.json."""

    recipe: str = "paper"
    """Source of the defaults of all other options: paper, usi, rsb-a2, in21k, finetune, digits or
    multilabel."""
    model: NetworkConfig = dataclasses.field(default_factory=NetworkConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    augment: AugmentConfig = dataclasses.field(default_factory=AugmentConfig)
    labels: LabelConfig = dataclasses.field(default_factory=LabelConfig)
    distill: DistillConfig = dataclasses.field(default_factory=DistillConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    ema: EmaConfig = dataclasses.field(default_factory=EmaConfig)
    compute: ComputeConfig = dataclasses.field(default_factory=ComputeConfig)
    run: RunConfig = dataclasses.field(default_factory=RunConfig)

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain values, as config.json holds them; tuples are lists."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


# Options that may change when a run is resumed, as they do not change its results. The images are
# compared by fingerprint, so a data set may move, but another one is refused.
FREE_AT_RESUME = frozenset(
    [
        "data",
        "data_root",
        "gpu_memory",
        "workers",
        "eval_interval",
        "checkpoint_interval_s",
        "log_interval",
        "skip_bad_steps",
        "progress",
        "tensorboard",
        "track",
    ]
)


# Fields that a run fills in if they are None.
RESOLVED = ("model", "input_size", "crop_pct", "crop_mode", "interpolation")


def to_json(config: TrainConfig) -> str:
    """Return the configuration as indented JSON text with a final newline."""
    return json.dumps(config.to_dict(), indent=2) + "\n"


def from_json(text: str, source: str = "the configuration") -> TrainConfig:
    """Return the configuration of a text by `to_json`, or raise `ConfigError` with `source`."""
    return fields.read(TrainConfig, text, source)


def load(path: Path) -> TrainConfig:
    """Read a config.json, or raise `ConfigError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"no readable config.json of a run at {path}: {error}") from error
    return from_json(text, str(path))


def flatten(config: TrainConfig) -> dict[str, Any]:
    """Return each option's value by its name without its group."""
    flat: dict[str, Any] = {}
    for name, value in vars(config).items():
        flat |= vars(value) if dataclasses.is_dataclass(value) else {name: value}
    return flat


def replace(config: TrainConfig, **changes: object) -> TrainConfig:
    """Return a copy with options changed by name, as in `replace(c, epochs=3)`."""
    groups = {"recipe": None} | {
        field.name: group
        for group, part in vars(config).items()
        if dataclasses.is_dataclass(part)
        for field in dataclasses.fields(part)
    }
    for name, value in changes.items():
        if name not in groups:
            raise ConfigError(fields.unknown("option", name, groups))
        change = {name: value}
        if group := groups[name]:
            change = {group: dataclasses.replace(getattr(config, group), **change)}
        config = dataclasses.replace(config, **change)
    return config


def absolute(config: TrainConfig) -> TrainConfig:
    """Return a copy whose existing files have absolute paths, to resume it from anywhere."""
    flat = flatten(config)
    names = [name for name in ("data", "hierarchy", "teacher") if flat[name] not in WRITTEN]
    found = [name for name in names if os.path.exists(flat[name] or "")]
    return replace(config, **{name: os.path.abspath(flat[name]) for name in found})


def differences(first: dict[str, Any], other: dict[str, Any], text: str) -> list[str]:
    """Return `text` with both values for each option that differs and changes the results."""
    return [
        f"{fields.option(name)} {text.format(value, other[name])}"
        for name, value in first.items()
        if name not in FREE_AT_RESUME and value != other[name]
    ]


def resumed(saved: TrainConfig, wanted: TrainConfig, best: Path) -> TrainConfig:
    """Return `wanted` with its open fields filled in from the run's first configuration.

    More epochs are possible with a constant rate, if no option counts epochs from the end; the
    warm-up keeps its length. Other options that change the results raise a `ConfigError` with
    `best`, the path of the run's weights.
    """
    before, now = flatten(saved), flatten(wanted)
    filled = {name: before[name] for name in RESOLVED if now[name] is None}
    if wanted.data.batch_size == AUTO:
        filled["batch_size"] = before["batch_size"]
    now |= filled
    from_the_end = before["mix_off_epochs"] or before["progressive_sizes"]
    endless = before["lr_schedule"] == "constant" and not from_the_end
    if endless and now["epochs"] > before["epochs"]:
        warmup_epochs = before["warmup_fraction"] * before["epochs"]
        filled["warmup_fraction"] = warmup_epochs / now["epochs"]
        before["epochs"] = now["epochs"]
    if differing := differences(before, now, "was {!r}, now {!r}"):
        raise ConfigError(
            "a run is resumed with the configuration it began with, but these options differ:\n  "
            + "\n  ".join(differing)
            + "\nleave them out to continue the run, or start a new one"
            f" (--weights {best} starts it from this one's weights); more --epochs are for a run of"
            " --lr-schedule constant without --mix-off-epochs and --progressive-sizes"
        )
    return replace(wanted, **filled)
