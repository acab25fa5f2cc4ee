"""What train.py does: brings a run's parts together and lets it run."""

import contextlib
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from torch import nn

from tresnet.data.seeding import mix_seed
from tresnet.engine import batch_size, distributed, rundir, state
from tresnet.engine import config as configs
from tresnet.engine.config import TrainConfig
from tresnet.engine.console import Console
from tresnet.engine.distill import create_teacher
from tresnet.engine.distributed import Processes
from tresnet.engine.images import create_loaders, fingerprint_beside, open_splits
from tresnet.engine.losses import Losses
from tresnet.engine.resolve import create_model, rebuild_model, resolve
from tresnet.engine.signals import StopRequest
from tresnet.engine.state import BEST, LAST, Identity, Record
from tresnet.engine.trainer import Trainer, TrainResult
from tresnet.engine.validate import validate
from tresnet.errors import ConfigError
from tresnet.measure.memory import MemoryMeter
from tresnet.settings import fields
from tresnet.steps import TrainingStep, create_training_step


def train(config: TrainConfig, resume: Path | None = None) -> TrainResult:
    """Train to the end, or until a signal asks to stop; under torchrun, with its other processes.

    Args:
        config: What to do. For a resumed run, the configuration it began with.
        resume: The directory of a run to go on with; `auto` for that of the run's name, if it has
            begun; None for a new run.

    Raises:
        ConfigError: The configuration does not fit, or differs from the resumed run's.
        DataError: The data set is incomplete or holds files that are not images.
        CheckpointError: Weights or a state cannot be read.
        WriteError: A state or the log cannot be written.
        BusyError: Another process is at work on the run.
        TrainingError: The loss is no longer finite, or the GPU's memory is full.
    """
    validate(config)
    with (
        StopRequest() as stop,
        distributed.join(config.compute.device) as processes,
        contextlib.ExitStack() as held,
    ):
        check_same_options(config, processes)
        console = Console(processes.is_main, config.run.progress)
        run_dir, found = None, None
        if processes.is_main:
            run_dir, found = rundir.claim(config, resume, held, console.say)
        run_dir, resumes = processes.from_main((run_dir, found is not None))
        if resumes and not processes.is_main:
            found = state.read(run_dir / LAST)
        saved, content = found or (None, None)
        if saved is None:
            config = resolve(config, processes.device.type == "cuda")
        else:
            config = configs.resumed(saved.config, config)
            configs.check_resumable(saved.config, config, run_dir / BEST)
        splits = open_splits(config, processes)
        images = len(splits.train)
        began = processes.world if saved is None else saved.identity.world
        beside, classes = fingerprint_beside(config), tuple(splits.classes)
        identity = Identity(began, **splits.fingerprints, beside=beside, classes=classes)
        if saved is not None:
            state.check(saved.identity, identity)
        config = batch_size.resolve(config, splits.classes, images, processes, console.say)
        record = Record(config, identity)
        config, passes = batch_size.spread(config, began, processes.world, images)
        if saved is not None and content is not None:
            record.progress = saved.progress
            before = batch_size.spread(record.config, began, len(content["generators"]), images)
            record.progress.batch = record.progress.batch * passes // before[1]
        loaders = create_loaders(config, splits, processes)
        memory = MemoryMeter(processes.device)
        memory.phase("initial")
        state.seed_everything(config.run.seed, processes.device)
        if content is None:
            model = create_model(config, splits.classes)
        else:
            model = rebuild_model(config, content["metadata"])
        if model.unpadded_shapes:
            console.say(f"channels padded to multiples of {config.model.pad}; --pad 1 leaves them")
        updates = -(-passes // config.optim.accumulate) * config.schedule.epochs
        step = create_step(model, config, processes, updates, console.say)
        teacher = create_teacher(config, splits.classes, processes.device)
        losses = Losses(config, splits.classes, processes.rank, teacher)
        memory.phase("model")
        state.seed_everything(mix_seed(config.run.seed, processes.rank), processes.device)
        if content is not None:
            state.restore(content, step, processes)
        del content
        if run_dir is None:
            now = datetime.now()
            made = rundir.create(config, now, held) if processes.is_main else None
            run_dir = processes.from_main(made)
        elif saved is None and processes.is_main:
            rundir.write_config(run_dir, config)
        trainer = Trainer(
            record,
            config,
            passes,
            run_dir,
            processes,
            splits,
            loaders,
            step,
            losses,
            memory,
            stop,
            console,
        )
        with contextlib.closing(trainer), trainer.explaining():
            return trainer.run()


def check_same_options(config: TrainConfig, processes: Processes) -> None:
    """Refuse processes that would train together with different options (a collective).

    Raises:
        ConfigError: They differ, save in what may differ between machines; or they would
            synchronise batch norm without GPUs.
    """
    if config.compute.sync_bn and processes.device.type != "cuda":
        raise ConfigError(
            "--sync-bn: PyTorch synchronises batch norm on GPUs only, expected one, got"
            f" {processes.device}: leave it out"
        )
    first, *others = processes.gather(configs.flatten(config))
    for rank, other in enumerate(others, start=1):
        differing = [
            f"{fields.option(name)} {value!r} and {other[name]!r}"
            for name, value in first.items()
            if name not in configs.FREE_AT_RESUME and value != other[name]
        ]
        if differing:
            raise ConfigError(
                f"expected the same options in all processes, got {', '.join(differing)} in process"
                f" 0 and {rank}: start each with the same, and look for processes of an earlier run"
            )


def create_step(
    model: nn.Module,
    config: TrainConfig,
    processes: Processes,
    updates: int,
    say: Callable[[str], object] | None = None,
) -> TrainingStep:
    """The training step of a resolved configuration; see `create_training_step`."""
    per_process = config.data.resolved_batch_size * config.optim.accumulate
    return create_training_step(
        model,
        config.compute,
        processes.device,
        optimizer=config.optim,
        ema=config.ema,
        schedule=config.schedule,
        updates=updates,
        global_batch=per_process * processes.world,
        world=processes.world,
        sync_bn=config.compute.sync_bn,
        grad_checkpointing=config.model.grad_checkpointing,
        mixes=config.augment.mixes or config.distill.teacher is not None,
        skips=config.run.skip_bad_steps > 0,
        say=say,
    )
