"""First phase of a run: complete its configuration, open its data, and build its model."""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tresnet import env
from tresnet.checkpoints.creation import create
from tresnet.checkpoints.metadata import check_metadata
from tresnet.checkpoints.weights import WeightsInfo, open_weights
from tresnet.data.classes import class_map, class_mismatch, output_order
from tresnet.engine import config as configs
from tresnet.engine import rundir, state
from tresnet.engine.batch_size import largest_batch_size
from tresnet.engine.config import AUTO, TrainConfig
from tresnet.engine.console import Console
from tresnet.engine.distributed import Processes
from tresnet.engine.images import Splits, default_crop, open_splits
from tresnet.engine.state import BEST, Identity, Progress, Resumed, RunRecord
from tresnet.errors import ConfigError, InputError
from tresnet.measure.memory import MemoryMeter
from tresnet.models import zoo
from tresnet.models.tresnet import TResNet
from tresnet.ops.dispatch import obstacle
from tresnet.settings import CROP, sides
from tresnet.settings.model import ModelShape


@dataclasses.dataclass(frozen=True)
class Fresh:
    """Directory and weights with which a new run starts."""

    run_dir: Path | None  # the run's empty directory; None if it must still be made
    weights: WeightsInfo | None  # None for random weights
    new_head: bool  # whether to replace the head even if it has the data's classes


Start = Fresh | Resumed


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """Size of a process's micro-batches, and their number per optimizer step and per epoch."""

    size: int  # images per micro-batch
    accumulate: int  # micro-batches per optimizer step
    per_epoch: int  # micro-batches per epoch

    @property
    def images_per_step(self) -> int:
        """Number of images of an optimizer step on one process."""
        return self.size * self.accumulate

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps of an epoch; the last step may have fewer micro-batches."""
        return math.ceil(self.per_epoch / self.accumulate)


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """Complete configuration, data, model and micro-batches of a run."""

    record: RunRecord
    splits: Splits
    batches: MicroBatches  # of each process
    model: TResNet  # on the CPU; a resumed run loads its weights later
    origin: str  # a line about where the model's tensors come from
    memory: MemoryMeter  # has measured the memory before the model was built
    run_dir: Path | None  # None if the directory must still be made
    resumed_from: Path | None  # file from which the state was read; None for a new run

    @property
    def config(self) -> TrainConfig:
        return self.record.config


def make_plan(
    wanted: TrainConfig,
    resume: Path | None,
    new_head: bool,
    processes: Processes,
    console: Console,
    stack: contextlib.ExitStack,
) -> tuple[RunPlan, Start]:
    """Complete the configuration `wanted`, and build the model of the run (a collective).

    `stack` receives the lock of a resumed run's directory. `train` describes `resume`, `new_head`
    and the errors.
    """
    # Resolve `amp` before ranks compare options, so that GPUs with unequal precisions are an error.
    amp = wanted.compute.decided(env.capability(processes.device)).amp
    wanted = configs.absolute(configs.replace(wanted, amp=amp))
    check_same_options(wanted, new_head, processes)
    if wanted.model.impl == "triton":
        reason = obstacle(processes.device, torch.float32)
        if reason is not None:
            raise InputError(f"impl='triton' {reason}: use impl='auto'")
    run_dir = saved = None
    if processes.is_main:
        run_dir, saved = rundir.claim(wanted, resume, stack, console.say)
    run_dir, path = processes.from_main((run_dir, saved and saved.path))
    memory = MemoryMeter(processes.device)
    memory.phase("initial")  # the model does not exist yet
    if path is not None:
        if new_head:
            console.say("--new-head has no effect: a resumed run keeps its head")
        start = saved or state.read(path)
        return plan_resumed(start, wanted, processes, memory), start
    name = wanted.model.weights
    if new_head and name is None:
        raise ConfigError("--new-head replaces the head of --weights, but no weights are given")
    weights, names = None if name is None else open_weights(name), class_map(wanted.data)
    if weights and names and weights.classes is None and len(names) == weights.num_classes:
        weights = weights.named(names)
    start = Fresh(run_dir, weights, new_head)
    return plan_fresh(start, wanted, processes, memory, console), start


def plan_fresh(
    start: Fresh,
    wanted: TrainConfig,
    processes: Processes,
    memory: MemoryMeter,
    console: Console,
) -> RunPlan:
    """Plan a new run."""
    config = fill_in(wanted, start.weights)
    splits = open_splits(config, processes)
    weights, images, world_size = start.weights, len(splits.train), processes.world_size
    reason = weights and why_new_head(config, weights, splits.classes, start.new_head)
    if weights and weights.classes and reason is None:
        splits.relabel(weights.classes)  # the order of the head's outputs
    state.seed_everything(config.run.seed, processes.device)
    model = create_model(config, splits.classes, weights, reason is not None)
    if config.data.batch_size == AUTO:
        data = (splits.classes, images)
        size = largest_batch_size(model, config, *data, processes, console.say)
        config = configs.replace(config, batch_size=size)
    identity = Identity(world_size, **splits.fingerprints, classes=tuple(splits.classes))
    batches = divide(config, world_size, world_size, images)
    line, record = origin(model, weights, reason), RunRecord(config, identity, Progress())
    return RunPlan(record, splits, batches, model, line, memory, start.run_dir, None)


def plan_resumed(
    start: Resumed, wanted: TrainConfig, processes: Processes, memory: MemoryMeter
) -> RunPlan:
    """Plan the rest of a run; the number of processes may have changed."""
    saved, run_dir = start.record, start.path.parent
    config = configs.resumed(configs.absolute(saved.config), wanted, run_dir / BEST)
    splits = open_splits(config, processes)
    if set(splits.classes) == set(saved.identity.classes):
        splits.relabel(saved.identity.classes)  # weights may have decided their order
    began, images, progress = saved.identity.world_size, len(splits.train), saved.progress
    identity = Identity(began, **splits.fingerprints, classes=tuple(splits.classes))
    state.check(saved.identity, identity)
    batches = divide(config, began, processes.world_size, images)
    before = divide(config, began, len(start.state["generators"]), images)
    # With another world size, an epoch has more or fewer micro-batches: keep the fraction done.
    progress.micro_batches = progress.micro_batches * batches.per_epoch // before.per_epoch
    model = rebuild_model(config, start.state["metadata"])
    record, line = RunRecord(config, identity, progress), f"{groups_of(model)} from {start.path}"
    return RunPlan(record, splits, batches, model, line, memory, run_dir, start.path)


def check_same_options(config: TrainConfig, new_head: bool, processes: Processes) -> None:
    """Raise ConfigError if ranks have unequal options, or `sync_bn` without GPU (a collective)."""
    if config.compute.sync_bn and processes.device.type != "cuda":
        raise ConfigError(
            "--sync-bn: PyTorch synchronises batch norm on GPUs only, expected a GPU,"
            f" got {processes.device}: leave the option out"
        )
    first, *others = processes.gather({"new_head": new_head, **configs.flatten(config)})
    for rank, other in enumerate(others, start=1):
        if differing := configs.differences(first, other, "{!r} and {!r}"):
            raise ConfigError(
                f"expected the same options in all processes, got {', '.join(differing)} in process"
                f" 0 and {rank}: start all with equal options, and end processes of earlier runs"
            )


def divide(config: TrainConfig, began: int, world_size: int, images: int) -> MicroBatches:
    """Divide an optimizer step's images among processes; raise ConfigError if that is impossible.

    `images` is the number of training images. `began` is the world size with which the run began.
    With another world size, a step keeps its number of images, but micro-batches may be smaller.
    """
    batch, accumulate = config.data.batch_size, config.optim.accumulate
    assert isinstance(batch, int), "filled in by plan_fresh"
    in_epoch = images // (batch * began) * (batch * began)
    if world_size == began:
        return MicroBatches(batch, accumulate, in_epoch // (batch * began))
    per_process, rest = divmod(batch * accumulate * began, world_size)
    # Try the sizes of micro-batches from the configured size downwards.
    for count in range(-(-per_process // batch), per_process + 1) if not rest else ():
        size = per_process // count
        unpaired = config.augment.mixes and size % 2
        if per_process % count == 0 and in_epoch % (size * world_size) == 0 and not unpaired:
            return MicroBatches(size, count, in_epoch // (size * world_size))
    raise ConfigError(
        f"the run began with {began} processes, each step of {per_process * world_size + rest}"
        f" images, which can't be divided among {world_size}: use {began} processes, or a number"
        " that divides the images"
    )


def fill_in(config: TrainConfig, weights: WeightsInfo | None = None) -> TrainConfig:
    """Fill in model, input size and test crop if None, from the weights or the model's defaults."""
    model = config.model.model
    if weights is not None:
        model, cfg = model or weights.config.variant, weights.pretrained_cfg
    else:
        assert model is not None, "checked by validate"
        cfg = zoo.default_pretrained_cfg(model, zoo.make_config(model))
    return configs.replace(config, model=model, **default_crop(config.data, cfg))


def why_new_head(
    config: TrainConfig, weights: WeightsInfo, classes: Sequence[str], requested: bool
) -> str | None:
    """Return the reason for a new head, or None if the head of the weights fits the data."""
    if reason := class_mismatch(weights.classes, weights.num_classes, classes):
        return reason
    if config.model.head not in (None, weights.config.head):
        return f"the weights have the head {weights.config.head}, got {config.model.head}"
    if requested:
        return "--new-head is given, though the weights have the data's classes"
    try:
        output_order(weights.classes, weights.num_classes, classes)
    except ConfigError as error:
        raise ConfigError(f"{error}, or start a new head by --new-head") from error
    return None


def create_model(
    config: TrainConfig,
    classes: Sequence[str],
    weights: WeightsInfo | None = None,
    new_head: bool = False,
) -> TResNet:
    """Build the model of a complete configuration; bad weights or sizes raise a TResNetError."""
    data, options = config.data, config.model.build | config.model.values(ModelShape)
    options |= {"num_classes": len(classes), "new_head": new_head}
    model = create(config.model.model, weights=weights, **options)
    assert isinstance(model, TResNet), "features_only is not an option"
    size = data.resolved_input_size
    for each in {size, *data.sizes}:
        # `check_input` reads only shape and dtype, so a meta tensor (without memory) will do.
        model.check_input(torch.empty(1, 3, *sides(each), device="meta"))
    # These values are saved with the weights, so that predictions use the same crop.
    crop = {name: getattr(data, name) for name in CROP}
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, *sides(size)), **crop}
    return model


def rebuild_model(config: TrainConfig, metadata: dict[str, Any]) -> TResNet:
    """Build the model that the metadata of a training state describes, with random weights."""
    stored = check_metadata(metadata)
    model = create(stored.variant, **(config.model.build | stored.options))
    assert isinstance(model, TResNet)
    model.pretrained_cfg = metadata["pretrained_cfg"]
    return model


def origin(model: TResNet, weights: WeightsInfo | None, new_head: str | None) -> str:
    """Return a line on the tensors' origin; `new_head` is the reason for a new head, or None."""
    groups = groups_of(model)
    if weights is None:
        return f"random weights: {groups}"
    if new_head is None:
        return f"{groups} from {weights.name}"
    return f"{groups.removesuffix(', head')} from {weights.name}; head new, as {new_head}"


def groups_of(model: TResNet) -> str:
    """Return the names of the model's groups of tensors: stem, stages and head."""
    names = (name.removeprefix("body.").partition(".")[0] for name in model.state_dict())
    return ", ".join(dict.fromkeys("stem" if name == "conv1" else name for name in names))
