"""The parts of a run: how it begins, its model, its training step, and `Run` with them all.

`begin` decides whether a run is `Fresh` or `Resumed`, which alone know where the order of classes,
weights and progress come from.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from tresnet.checkpoints.creation import create
from tresnet.checkpoints.describe import Checkpoint, open_checkpoint
from tresnet.checkpoints.metadata import check_metadata
from tresnet.data.labels import class_map, match
from tresnet.data.loaders import Loader
from tresnet.engine import rundir, state
from tresnet.engine.batch_size import MicroBatches, divide
from tresnet.engine.config import Filled, Resolved, TrainConfig
from tresnet.engine.distributed import Processes
from tresnet.engine.evaluate import Metrics, MultiLabelMetrics, evaluate
from tresnet.engine.losses import Losses
from tresnet.engine.resolve import fill
from tresnet.engine.splits import Splits, open_splits
from tresnet.engine.state import Identity, Progress, Saved
from tresnet.errors import ConfigError, listed
from tresnet.measure.memory_meter import MemoryMeter
from tresnet.models.tresnet import TResNet
from tresnet.settings import CROP, sides
from tresnet.settings.fields import replace
from tresnet.steps import InferenceStep, StepHost, TrainingStep


@dataclasses.dataclass(frozen=True)
class Run:
    """Configuration and data of a run, and this process's loaders, losses and steps."""

    config: Resolved
    identity: Identity
    progress: Progress
    splits: Splits
    train_loader: Loader
    val_loader: Loader
    batches: MicroBatches  # of each process
    step: TrainingStep
    origin: str  # a line about the source of the weights, and why the head is new
    eval_step: InferenceStep
    losses: Losses
    memory: MemoryMeter  # began to measure before the model was built
    processes: Processes
    run_dir: Path | None  # None if the directory must still be made
    resumed_from: Path | None  # file from which the state was read; None for a new run

    def evaluate(self) -> Metrics | MultiLabelMetrics:
        """Evaluate the EMA if the run has one, else the model (a collective).

        The training step's CUDA graphs keep the memory of a step. If that leaves too little, they
        are dropped, and captured again in the next epoch.
        """
        # Processes train on different images, so running statistics differ: evaluate process 0's.
        self.processes.broadcast(self.step.eval_model.buffers())
        try:
            return self._evaluate()
        except torch.OutOfMemoryError:  # comes before the collectives at the end of an evaluation
            if not self.step.drop_graphs():
                raise
        torch.cuda.empty_cache()  # after the handler, because the error holds tensors
        self.processes.console.warn(
            f"process {self.processes.rank}: the memory was full in the evaluation, which begins"
            " again without the CUDA graphs of the training step"
        )
        return self._evaluate()

    def _evaluate(self) -> Metrics | MultiLabelMetrics:
        labels = self.config.labels
        return evaluate(
            labels.threshold if labels.multi else None,
            self.eval_step,
            self.val_loader,
            self.processes,
            levels=self.losses.levels,
        )


def begin(
    wanted: TrainConfig,
    resume: Path | None,
    new_head: bool,
    processes: Processes,
    stack: contextlib.ExitStack,
) -> "tuple[Path | None, Fresh | Resumed]":
    """Find the run to resume, or open the weights of a new one (a collective).

    `stack` receives the lock of the directory, which is None if it must still be made.
    """
    run_dir = saved = None
    if processes.is_main:
        run_dir, saved = rundir.claim(wanted, resume, stack, processes.console.say)
    run_dir, path = processes.from_main((run_dir, saved and saved.path))
    if path is None:
        return run_dir, Fresh(initial_weights(wanted, new_head), new_head)
    if new_head:
        processes.console.say("--new-head has no effect: a resumed run keeps its head")
    return run_dir, Resumed(saved or state.read(path))


@dataclasses.dataclass(frozen=True)
class Fresh:
    """A new run, which starts from weights, or from random ones if `weights` is None."""

    weights: Checkpoint | None
    new_head: bool  # whether the weights' head is replaced even if it fits the data
    path = None
    epoch = 0

    def fill(self, wanted: TrainConfig) -> Filled:
        return fill(wanted, self.weights)

    def data(self, config: Filled, processes: Processes) -> tuple[Splits, Identity]:
        """Open the images, and put their classes into the order of the weights' outputs."""
        splits, weights = open_splits(config, processes), self.weights
        if weights and weights.classes and not self._why_new_head(config, splits.classes):
            splits = splits.arranged(weights.classes)
        return splits, splits.identity(processes.world_size)

    def model(
        self, config: Filled, classes: Sequence[str], device: torch.device
    ) -> tuple[TResNet, str]:
        """Return the model, and a line about the source of its weights."""
        state.seed_everything(config.run.seed, device)
        reason = self._why_new_head(config, classes)
        parts = config.step.optim.train_only
        why = reason if self.weights else "no --weights are given"
        advice = "add head" if self.weights else "add head, or give --weights"
        if why and parts and "head" not in parts:
            raise ConfigError(
                f"--train-only: the head is new, as {why}: expected head among the parts to"
                f" train, got {listed(parts)}: {advice}"
            )
        model = create_model(config, classes, self.weights, reason is not None)
        origin = f"weights from {self.weights.name}" if self.weights else "random weights"
        return model, origin if reason is None else f"{origin}; head new, as {reason}"

    def progress(
        self, step: TrainingStep, config: Resolved, splits: Splits, processes: Processes
    ) -> Progress:
        return Progress()

    def _why_new_head(self, config: Filled, classes: Sequence[str]) -> str | None:
        weights = self.weights
        return weights and why_new_head(config, weights, classes, self.new_head)


@dataclasses.dataclass(frozen=True)
class Resumed:
    """A run that goes on from a saved state."""

    saved: Saved

    @property
    def path(self) -> Path:
        return self.saved.path

    @property
    def epoch(self) -> int:
        return self.saved.progress.epoch

    def fill(self, wanted: TrainConfig) -> Filled:
        return fill(wanted, saved=self.saved)

    def data(self, config: Filled, processes: Processes) -> tuple[Splits, Identity]:
        """Open the images, and check that they are those with which the run began."""
        splits, saved = open_splits(config, processes), self.saved.identity
        if set(splits.classes) == set(saved.classes):
            splits = splits.arranged(saved.classes)  # weights may have decided their order
            if splits.fingerprints["train"] != saved.train:
                # Earlier versions sorted numbers as texts before they hashed the labels.
                splits = splits.hashed(config, processes)
        identity = splits.identity(saved.world_size)
        state.check(saved, identity)
        return splits, identity

    def model(
        self, config: Filled, classes: Sequence[str], device: torch.device
    ) -> tuple[TResNet, str]:
        """Return the model, whose weights `progress` loads, and a line about their source."""
        metadata = self.saved.state["metadata"]
        stored = check_metadata(metadata)
        model = create(stored.variant, **(config.step.build.options | stored.options))
        assert isinstance(model, TResNet)
        model.pretrained_cfg = metadata["pretrained_cfg"]
        return model, f"weights from {self.path}"

    def progress(
        self, step: TrainingStep, config: Resolved, splits: Splits, processes: Processes
    ) -> Progress:
        """Restore weights, optimizer and random generators; return how far the run has come."""
        state.restore(self.saved.state, step, processes)
        worlds = len(self.saved.state["generators"]), processes.world_size
        began, images = self.saved.identity.world_size, len(splits.train)
        before, now = (divide(config, began, world, images).per_epoch for world in worlds)
        # With another world size, an epoch has more or fewer micro-batches: keep the fraction done.
        progress = self.saved.progress
        progress.micro_batches = progress.micro_batches * now // before
        return progress


def initial_weights(options: TrainConfig, new_head: bool) -> Checkpoint | None:
    """Open the weights with which a new run starts; None for random weights."""
    name = options.weights
    if new_head and name is None:
        raise ConfigError("--new-head replaces the head of --weights, but no weights are given")
    if name is None:
        return None
    weights, names = open_checkpoint(name), class_map(options.data.class_map)
    weights.check_finite()
    if names and weights.classes is None and len(names) == weights.num_classes:
        weights = weights.named(names)
    return weights


def why_new_head(
    config: Filled, weights: Checkpoint, classes: Sequence[str], requested: bool
) -> str | None:
    """Return the reason for a new head, or None if the head of the weights fits the data."""
    wanted = None
    if config.shape.head not in (None, weights.config.head):
        wanted = f"the weights have the head {weights.config.head}, got {config.shape.head}"
    elif requested:
        wanted = "--new-head is given, though the weights have the data's classes"
    try:
        found = match(classes, weights.classes or weights.num_classes, "new head")
    except ConfigError as error:
        if wanted is None:
            raise ConfigError(f"{error}, or start a new head by --new-head") from error
        return wanted
    return found.new_head or wanted


def create_model(
    config: Filled,
    classes: Sequence[str],
    weights: Checkpoint | None = None,
    new_head: bool = False,
) -> TResNet:
    """Build the model of a complete configuration; bad weights or sizes raise a TResNetError."""
    data, options = config.data, config.step.build.options | vars(config.shape)
    options |= {"num_classes": len(classes), "new_head": new_head}
    model = create(config.model, weights=weights, **options)
    assert isinstance(model, TResNet), "features_only is not an option"
    for each in {data.input_size, *data.sizes}:
        # `check_input` reads only shape and dtype, so a meta tensor (without memory) will do.
        model.check_input(torch.empty(1, config.in_chans, *sides(each), device="meta"))
    # These values are saved with the weights, so that predictions use the same crop.
    crop = {name: getattr(data, name) for name in CROP}
    size = {"input_size": (config.in_chans, *sides(data.input_size))}
    model.pretrained_cfg = model.pretrained_cfg | size | crop
    return model


def training_step(
    model: nn.Module,
    config: Resolved,
    processes: Processes,
    batches: MicroBatches,
    epoch: int = 0,
) -> TrainingStep:
    """Return the training step of a complete configuration, as `epoch` (from 0) begins."""
    # Each process chooses its CUDA graphs, and one that runs eagerly slows all others down.
    prefix = f"process {processes.rank}: " if processes.world_size > 1 else ""
    host = StepHost(
        device=processes.device,
        world_size=processes.world_size,
        sync_bn=config.machine.sync_bn,
        global_batch=batches.images_per_step * processes.world_size,
        schedule=config.schedule,
        total_steps=batches.steps_per_epoch * config.schedule.epochs,
        mixes=config.augment.mixes or config.distill.teacher is not None,
        skips=config.run.skip_bad_steps > 0,
        normalised_by=getattr(model, "pretrained_cfg", None),
        say=processes.console.say,
        warn=lambda text: processes.console.warn(f"{prefix}{text}"),
    )
    changes = {"accumulate": batches.accumulate, "train_only": config.trained_parts(epoch)}
    return TrainingStep(model, replace(config.step, **changes), host)
