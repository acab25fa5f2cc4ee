"""Configuration of a training run: frozen dataclasses, one per concern.

Every field is an option of `train.py`; names are unique over all groups, so
`config.schedule.epochs` is `--epochs`. The text under a field is its help on the command line, and
its type says which numbers it takes.
"""

import dataclasses
import json
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

# What `batch_size` says where the memory is to decide.
AUTO = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkConfig(TrainingBuild, ModelShape):
    """Which model, and what it starts from."""

    model: str | None = None
    """Variant, such as tresnet_m. None: the one that the weights name."""
    weights: str | None = None
    """Start from these weights: a tag of `tresnet list`, a file, a directory in timm's layout or
    hf-hub:USER/NAME. None: random weights."""
    new_head: bool = False
    """Leave the head of the weights out and start a new one for the classes of the data."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageConfig(EvalTransform):
    """Which images, and how they are read and tested."""

    data: str | None = None
    """Directory with train/CLASS/ and val/CLASS/ image folders, or with train.csv and val.csv where
    images have several labels, or `digits` or `digits_multilabel`."""
    data_root: str = "data"
    """Directory in which the digits are written."""
    workers: CountOrZero = 4
    """Processes that load images, per process that computes. 0: that process itself."""
    skip_bad_images: bool = False
    """Count unreadable images and go on, instead of stopping."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(ImageConfig):
    """Which images, and how they reach the model."""

    batch_size: Size | Literal["auto"] = 128
    """Images per process (per GPU) and forward pass. auto: as many as are sure to fit the GPU."""
    eval_batch_size: Size | None = None
    """Images per process and forward pass in evaluation. None: as in training."""
    progressive_sizes: tuple[Size, ...] | None = None
    """Train at these sizes one after the other, each for an equal share of the epochs, and test at
    --input-size. None: train at --input-size."""

    @property
    def resolved_batch_size(self) -> int:
        """`batch_size` of a resolved configuration, in which it is a number."""
        assert isinstance(self.batch_size, int), "filled in by batch_size.resolve"
        return self.batch_size

    @property
    def resolved_input_size(self) -> int:
        """`input_size` of a resolved configuration, which is filled in."""
        assert self.input_size is not None, "filled in by resolve"
        return self.input_size

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of training images, in their order, of a resolved configuration."""
        return self.progressive_sizes or (self.resolved_input_size,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AugmentConfig(Augment):
    """How training images and labels are varied, in this order."""

    aug_repeats: Count = 1
    """How often an image comes in an epoch, varied anew each time (arXiv 1902.05509); so many fewer
    images come in it."""
    mixup: PositiveOrZero = 0.0
    """Alpha of mixup. 0: none."""
    cutmix: PositiveOrZero = 0.0
    """Alpha of cutmix. 0: none."""
    mix_prob: Fraction = 1.0
    """Probability that a batch is mixed at all, where mixup or cutmix is on."""
    mix_off_epochs: CountOrZero = 0
    """Train the last so many epochs without mixup and cutmix."""
    label_smoothing: FractionBelow1 = 0.0
    """Probability mass spread over all classes."""

    @property
    def mixes(self) -> bool:
        """Whether images and labels are mixed."""
        return self.mixup > 0 or self.cutmix > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelConfig(Settings):
    """One label an image, or any number of them, and the loss."""

    loss: Literal["cross-entropy", "one-vs-all", "semantic-softmax", "bce", "asymmetric"] = (
        "cross-entropy"
    )
    """For one label an image: cross-entropy, one-vs-all (a binary cross-entropy for each class,
    arXiv 2110.00476) or semantic-softmax (arXiv 2104.10972). For any number of them, listed in
    train.csv and val.csv or in COCO's JSON: bce or asymmetric (arXiv 2009.14119)."""
    bce_target_thresh: FractionBelow1 | None = None
    """One-vs-all: shares of a mixed label above this count as 1, others as 0. None: as they are."""
    hierarchy: str | None = None
    """Semantic softmax: a JSON file, {"class": "the class above it"}."""
    gamma_neg: PositiveOrZero = 4.0
    """Asymmetric loss: how much easy negatives are discounted."""
    gamma_pos: PositiveOrZero = 1.0
    """Asymmetric loss: how much easy positives are discounted."""
    prob_margin: FractionBelow1 = 0.05
    """Asymmetric loss: negatives below this probability count nothing."""
    threshold: Fraction = 0.5
    """Probability from which a label counts as predicted, for F1."""

    @property
    def multi(self) -> bool:
        """Whether an image has any number of labels."""
        return self.loss in ("bce", "asymmetric")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillConfig(Settings):
    """A teacher, whose answers are learned beside the labels."""

    teacher: str | None = None
    """Weights of the teacher: a tag of `tresnet list`, a file or hf-hub:USER/NAME, or timm:NAME for
    timm's model with its pretrained weights. None: no teacher."""
    kd_weight: PositiveOrZero = 5.0
    """Weight of the teacher's answers beside the labels' 1."""
    kd_temperature: Positive = 1.0
    """Temperature at which both answers are compared."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeConfig(Compute):
    """On what, and in which precision and layout."""

    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: a GPU if there is one."""
    sync_bn: bool = False
    """Batch norm over the images of all GPUs."""
    gpu_memory: str | None = None
    """Memory that --batch-size auto may count on, such as 24GiB. None: what is free on the GPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """What the run is called, writes and shows."""

    name: str | None = None
    """Name of the run directory, which must not exist. None: model, data and date."""
    runs: str = "runs"
    """Directory of run directories."""
    seed: Annotated[int, Ge(0), Lt(2**63)] = 0
    """Seed of weights, data order and augmentation."""
    eval_interval: Count = 1
    """Epochs between evaluations; the last epoch always has one."""
    checkpoint_interval_s: PositiveOrZero = 600.0
    """Seconds between checkpoints within an epoch; each epoch ends with one anyway."""
    log_interval: Count = 50
    """Updates between looks at the loss, and between lines where no bar is shown."""
    skip_bad_steps: CountOrZero = 0
    """Leave out so many updates whose loss or gradient is not finite; then stop. More than 0 waits
    for the device once an update."""
    progress: bool = True
    """Show a progress bar, if the output is a terminal."""
    tensorboard: bool = True
    """Write TensorBoard events, if it is installed."""
    track: Literal["wandb", "trackio"] | None = None
    """Send the numbers of the log to W&B or trackio too, which has to be installed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Settings):
    """Everything that decides a training run; saved with it as config.json."""

    recipe: str = "paper"
    """Where the defaults of all other options come from: paper, usi, rsb-a2, in21k, finetune,
    digits or multilabel."""
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


# What may change when a run is resumed: none of it alters what is computed. The images themselves
# are compared by fingerprint, so a data set that moved is found again and another one is refused.
FREE_AT_RESUME = frozenset(
    [
        "data",
        "data_root",
        "eval_batch_size",
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


# What a run fills in that its options leave open.
RESOLVED = ("model", "input_size", "crop_pct", "crop_mode", "interpolation")


def to_json(config: TrainConfig) -> str:
    """Return the configuration as indented JSON text with a final newline."""
    return json.dumps(config.to_dict(), indent=2) + "\n"


def from_json(text: str, source: str = "the configuration") -> TrainConfig:
    """Read what `to_json` wrote, or raise `ConfigError`; `source` says where it came from."""
    return fields.read(TrainConfig, text, source)


def load(path: Path) -> TrainConfig:
    """Read a config.json, or raise `ConfigError`."""
    try:
        if not path.is_file():
            raise FileNotFoundError("no such file")
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


def resumed(saved: TrainConfig, wanted: TrainConfig) -> TrainConfig:
    """Return `wanted` with what it leaves open filled in by the run's first configuration."""
    before, now = flatten(saved), flatten(wanted)
    left_open = [name for name in RESOLVED if now[name] is None]
    if wanted.data.batch_size == AUTO:
        left_open.append("batch_size")
    return replace(wanted, **{name: before[name] for name in left_open})


def check_resumable(saved: TrainConfig, wanted: TrainConfig, best: Path) -> None:
    """Raise `ConfigError`, naming the run's weights, where options would compute something else."""
    before, now = flatten(saved), flatten(wanted)
    differing = [
        f"{fields.option(name)}: the run has {before[name]!r}, now {now[name]!r}"
        for name in before
        if name not in FREE_AT_RESUME and before[name] != now[name]
    ]
    if differing:
        raise ConfigError(
            "a run is resumed with the configuration it began with, but these options differ:\n  "
            + "\n  ".join(differing)
            + "\nleave them out to go on with the run, or start a new one"
            f" (--weights {best} starts it from this one's weights)"
        )
