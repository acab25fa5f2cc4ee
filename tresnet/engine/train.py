"""Train a model: data, model, step, loop, end. `dry_run` stops before the loop."""

import contextlib
import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from tresnet import environment
from tresnet.checkpoints.fit import load_checkpoint
from tresnet.data.seeding import mix_seed
from tresnet.engine import config as configs
from tresnet.engine import distributed, logs, rundir, state
from tresnet.engine.batch_size import divide, resolve
from tresnet.engine.config import TrainConfig
from tresnet.engine.distributed import StopRequest
from tresnet.engine.evaluate import Metrics, MultiLabelMetrics
from tresnet.engine.logs import RunLog, draw
from tresnet.engine.loop import Loop
from tresnet.engine.losses import create_losses
from tresnet.engine.recovery import Checkpoints
from tresnet.engine.resolve import agreed
from tresnet.engine.run import Run, begin, training_step
from tresnet.engine.splits import open_loaders, set_statistics
from tresnet.engine.state import BEST
from tresnet.errors import CheckpointError
from tresnet.measure.memory_meter import MemoryMeter
from tresnet.steps import InferenceStep
from tresnet.steps.freezing import describe_trained
from tresnet.steps.inference import describe_implementation


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """Result of `train`."""

    run_dir: Path
    metrics: Metrics | MultiLabelMetrics | None  # metrics of the best weights; None if stopped
    stopped_by: int = 0  # number of the signal that stopped the run early, or 0


def train(wanted: TrainConfig, resume: Path | None = None, new_head: bool = False) -> TrainResult:
    """Train to the end or until a signal; under torchrun, every process calls this function.

    `resume` is a run's directory, `auto` for the directory that `wanted.run.name` names, or None
    for a new run. `resolve.resumed` says which options may differ on resume. A new run gets a
    new head if the initial weights have other classes than the data, or if `new_head` is true.

    Raises:
        ConfigError, InputError: `wanted` has wrong values, or differs from the run to resume.
        DataError, CheckpointError: Images, weights or a state cannot be read.
        WriteError: A state or the log cannot be written.
        BusyError: Another process uses the run's directory.
        TrainingError: A loss, gradient or weight is not finite, or the GPU's memory is full.
    """
    with StopRequest() as stop, contextlib.ExitStack() as stack:
        run = prepare(wanted, resume, new_head, stack, wanted.run.progress)
        processes, run_dir = run.processes, run.run_dir
        if processes.is_main:
            if run_dir is None:
                run_dir = rundir.create(run.config, stack)
            else:
                rundir.reopen(run_dir, run.config, run.resumed_from)
        # Only process 0 knows the name of a new directory, so it sends the path to the others.
        run_dir = processes.from_main(run_dir)
        checkpoints = Checkpoints(run_dir, run)
        with checkpoints.adding_advice():
            log = _open_log(run, checkpoints, stack)
            stopped_by = Loop(run, checkpoints, log, stop).run()
            metrics = None if stopped_by else finish(run, checkpoints, log)
        if stopped_by:
            processes.console.say(
                f"stopped by {signal.Signals(stopped_by).name} after step"
                f" {run.progress.global_step}, saved; continue with: --resume {run_dir}"
            )
        return TrainResult(run_dir, metrics, stopped_by)


def dry_run(wanted: TrainConfig, resume: Path | None = None, new_head: bool = False) -> None:
    """Prepare a run up to its first batch, as `train` does; print the complete configuration.

    No run directory is made. Only the lock file of a run to resume changes. `train` has the errors.
    """
    with contextlib.ExitStack() as stack:
        run = prepare(wanted, resume, new_head, stack, stream="stderr")
        run.processes.console.say(run.origin)
        if run.processes.is_main:
            sys.stdout.write(configs.to_json(run.config))


def prepare(
    wanted: TrainConfig,
    resume: Path | None,
    new_head: bool,
    stack: contextlib.ExitStack,
    progress: bool = False,
    stream: str = "stdout",
) -> Run:
    """Join the processes, resolve the configuration, and build all parts of the run.

    `stack` receives the processes to leave, the lock of a resumed run's directory, and the loaders
    to close. `join` describes `progress` and `stream`, and `train` the others and the errors.
    """
    configs.validate(wanted)
    processes = stack.enter_context(distributed.join(wanted.machine.device, progress, stream))
    wanted = agreed(wanted, new_head, processes)
    memory, device = MemoryMeter(processes.device), processes.device
    memory.phase("initial")  # the model does not exist yet
    run_dir, start = begin(wanted, resume, new_head, processes, stack)
    filled = start.fill(wanted)
    splits, identity = start.data(filled, processes)
    classes, images = splits.classes, len(splits.train)
    model, origin = start.model(filled, classes, device)
    set_statistics(model, splits, processes)
    config = resolve(filled, model, classes, images, processes)
    if config.machine.deterministic:
        # The first call of cuBLAS reads this variable, so it is set before the model runs.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)
    batches = divide(config, identity.world_size, processes.world_size, images)
    train_loader, val_loader = open_loaders(config, splits, batches.size, processes, stack)
    step = training_step(model, config, processes, batches, start.epoch)
    losses = create_losses(config, splits.train, processes)
    memory.phase("model")
    options: Any = {"say": processes.console.say, "normalised_by": model.pretrained_cfg}
    # Each process has its own seed, so that dropout masks differ. A resumed run has other states.
    state.seed_everything(mix_seed(config.run.seed, processes.rank), device)
    return Run(
        config=config,
        identity=identity,
        progress=start.progress(step, config, splits, processes),
        splits=splits,
        train_loader=train_loader,
        val_loader=val_loader,
        batches=batches,
        step=step,
        origin=origin,
        eval_step=InferenceStep(step.eval_model, config.step.compute, device, **options),
        losses=losses,
        memory=memory,
        processes=processes,
        run_dir=run_dir,
        resumed_from=start.path,
    )


def finish(run: Run, checkpoints: Checkpoints, log: RunLog | None) -> Metrics | MultiLabelMetrics:
    """Load and evaluate the best weights; log, plot and print the result."""
    run_dir, progress = checkpoints.run_dir, run.progress
    if not progress.best_epoch:
        raise checkpoints.diverged("no epoch's outputs on the validation images are finite")
    evaluated, best = run.step.eval_model, run_dir / BEST
    if run.processes.is_main:
        if not best.exists():
            raise CheckpointError(
                f"{best} is missing, the best weights of epoch {progress.best_epoch}: put the file"
                " back, or start a new run"
            )
        load_checkpoint(evaluated, best)
    run.processes.broadcast(evaluated.state_dict().values())
    metrics = run.evaluate()
    if log is not None:
        figures = {"images_per_s": metrics.images_per_s, **metrics.figures()}
        memory, elapsed_s = run.memory.phase("final"), checkpoints.elapsed_s
        title = f"{run_dir.resolve().name}: {run.config.model}, {run.config.recipe}"
        try:  # before the final row is logged: a run resumed after the final row does not draw
            draw(run_dir, log.rows, title)
        except Exception as error:  # matplotlib also raises ValueError, as for a bad MPLBACKEND
            run.processes.console.say(f"warning: no picture of the run: {error}")
        log.phase("final", progress, memory, elapsed_s, **figures)
    last = f"{progress.last_score:.2f} %" if progress.last_score >= 0 else "not finite"
    run.processes.console.say(
        f"result: {metrics.summary()} on {metrics.images} images with {best} (epoch"
        f" {progress.best_epoch}; after the last epoch {last}),"
        f" {progress.elapsed_s:.0f} s of training"
    )
    if progress.skipped or metrics.skipped:
        run.processes.console.say(
            f"unreadable images left out: {len(progress.skipped)} to train, {metrics.skipped} to"
            " validate"
        )
    return metrics


def _open_log(run: Run, checkpoints: Checkpoints, stack: contextlib.ExitStack) -> RunLog | None:
    """Print a run's first lines; return its log, or None for a complete log or a rank above 0."""
    run_dir, processes = checkpoints.run_dir, run.processes
    config, progress, splits, batches = run.config, run.progress, run.splits, run.batches
    implementation = describe_implementation(run.step.model, config.step.compute, processes.device)
    began, size, say = run.identity.world_size, processes.world_size, run.processes.console.say
    if began != size:
        say(
            f"the run began with {began} process{'es' * (began > 1)}: on {size} a step is"
            f" {batches.accumulate} x {batches.size} images on each"
        )
    images, each = batches.images_per_step, f"{size} x {processes.device}"
    say(
        f"{config.model} on {config.data.data}: {len(splits.train)} images to train,"
        f" {len(splits.val)} to validate, {splits.train.labels.describe()}; {images} images per"
        f" step on each of {each}, {images * size} in all; writing to {run_dir}"
    )
    say(run.origin)
    if config.trained_parts(progress.epoch) is not None:
        say(describe_trained(run.step.model))
    say(f"stages run by {implementation}")
    rows = logs.read_rows(run_dir, progress.epoch) if run.resumed_from else []
    ended = progress.epoch == config.schedule.epochs
    if not processes.is_main or (ended and any(row["phase"] == "final" for row in rows)):
        return None
    rows = [row for row in rows if row["phase"] != "final"]  # `finish` appends a new final row
    start = {
        "processes": size,
        "from_step": progress.global_step,
        "implementation": implementation,
    }
    rundir.add_environment(run_dir, environment.describe(processes.device) | start)
    log = RunLog(run_dir, rows, progress.global_step, config)
    stack.callback(log.close)
    if run.resumed_from is None:
        for phase in ("initial", "model"):
            log.phase(phase, progress, run.memory.phases[phase], checkpoints.elapsed_s)
    return log
