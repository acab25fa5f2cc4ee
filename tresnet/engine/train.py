"""Train a model in four phases: plan, prepare, loop, finish. `dry_run` stops after the second."""

import contextlib
import dataclasses
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from tresnet import env
from tresnet.checkpoints.load import load_checkpoint
from tresnet.engine import config as configs
from tresnet.engine import distributed, logs, rundir
from tresnet.engine.config import TrainConfig
from tresnet.engine.console import Console
from tresnet.engine.distributed import Processes, StopRequest
from tresnet.engine.evaluate import Metrics, MultiLabelMetrics
from tresnet.engine.logs import RunLog, draw
from tresnet.engine.loop import Loop
from tresnet.engine.plan import RunPlan, make_plan
from tresnet.engine.prepare import RunSetup, prepare
from tresnet.engine.recovery import Checkpoints
from tresnet.engine.state import BEST
from tresnet.errors import CheckpointError, listed
from tresnet.steps.inference import describe_implementation


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """Result of `train`."""

    run_dir: Path
    metrics: Metrics | MultiLabelMetrics | None  # metrics of the best weights; None if stopped
    best_epoch: int  # counts from 1; 0 before the first evaluation
    last_score: float  # top-1 accuracy or mAP in percent; -1 before the first evaluation
    stopped_by: int = 0  # number of the signal that stopped the run early, or 0


def train(wanted: TrainConfig, resume: Path | None = None, new_head: bool = False) -> TrainResult:
    """Train to the end or until a signal; under torchrun, every process calls this function.

    `resume` is a run's directory, `auto` for the directory that `wanted.run.name` names, or None
    for a new run. `config.resumed` says which options may differ on resume. A new run gets a
    new head if the initial weights have other classes than the data, or if `new_head` is true.

    Raises:
        ConfigError, InputError: `wanted` has wrong values, or differs from the run to resume.
        DataError, CheckpointError: Images, weights or a state cannot be read.
        WriteError: A state or the log cannot be written.
        BusyError: Another process uses the run's directory.
        TrainingError: A loss, gradient or weight is not finite, or the GPU's memory is full.
    """
    configs.validate(wanted)
    with StopRequest() as stop, contextlib.ExitStack() as stack:
        processes = stack.enter_context(distributed.join(wanted.compute.device))
        console = Console(processes.is_main, wanted.run.progress)
        plan, start = make_plan(wanted, resume, new_head, processes, console, stack)
        setup = prepare(plan, start, processes, console)
        stack.callback(setup.close)  # ends workers before the lock is released
        del start  # frees the loaded tensors, which model and optimizer have copied
        run_dir = plan.run_dir
        if processes.is_main:
            if run_dir is None:
                run_dir = rundir.create(plan.config, stack)
            else:
                rundir.reopen(run_dir, plan.config, plan.resumed_from)
        # Only process 0 knows the name of a new directory, so it sends the path to the others.
        checkpoints = Checkpoints(processes.from_main(run_dir), setup)
        with checkpoints.adding_advice():
            log = _open_log(setup, checkpoints, stack)
            stopped_by = Loop(setup, checkpoints, log, stop).run()
            metrics = None if stopped_by else finish(setup, checkpoints, log)
        run_dir, progress = checkpoints.run_dir, plan.record.progress
        if stopped_by:
            console.say(
                f"stopped by {signal.Signals(stopped_by).name} after step {progress.global_step},"
                f" saved; continue with: --resume {run_dir}"
            )
        return TrainResult(run_dir, metrics, progress.best_epoch, progress.last_score, stopped_by)


def dry_run(wanted: TrainConfig, resume: Path | None = None, new_head: bool = False) -> None:
    """Prepare a run up to its first batch, as `train` does; print the complete configuration.

    No run directory is made. Only the lock file of a run to resume changes. `train` has the errors.
    """
    configs.validate(wanted)
    with contextlib.ExitStack() as stack:
        processes = stack.enter_context(distributed.join(wanted.compute.device))
        console = Console(processes.is_main, progress=False, stream="stderr")
        plan, start = make_plan(wanted, resume, new_head, processes, console, stack)
        prepare(plan, start, processes, console).close()
        console.say(plan.origin)
        if processes.is_main:
            sys.stdout.write(configs.to_json(plan.config))


def finish(
    setup: RunSetup, checkpoints: Checkpoints, log: RunLog | None
) -> Metrics | MultiLabelMetrics:
    """Load and evaluate the best weights; log, plot and print the result."""
    plan, run_dir, progress = setup.plan, checkpoints.run_dir, setup.plan.record.progress
    evaluated, best = setup.step.eval_model, run_dir / BEST
    if setup.processes.is_main:
        if not best.exists():
            raise CheckpointError(
                f"{best} is missing, the best weights of epoch {progress.best_epoch}: put the file"
                " back, or start a new run"
            )
        load_checkpoint(evaluated, best)
    setup.processes.broadcast(evaluated.state_dict().values())
    metrics = setup.evaluate()
    if log is not None:
        figures = {"images_per_s": metrics.images_per_s, **metrics.figures()}
        memory, elapsed_s = plan.memory.phase("final"), checkpoints.elapsed_s
        title = f"{run_dir.resolve().name}: {plan.config.model.model}, {plan.config.recipe}"
        try:  # before the final row is logged: a run resumed after the final row does not draw
            draw(run_dir, log.rows, title)
        except Exception as error:  # matplotlib also raises ValueError, as for a bad MPLBACKEND
            setup.console.say(f"warning: no picture of the run: {error}")
        log.phase("final", progress, memory, elapsed_s, **figures)
    setup.console.say(
        f"result: {metrics.summary()} on {metrics.images} images with {best} (epoch"
        f" {progress.best_epoch}; after the last epoch {progress.last_score:.2f} %),"
        f" {progress.elapsed_s:.0f} s of training"
    )
    if progress.skipped or metrics.skipped:
        setup.console.say(
            f"unreadable images left out: {len(progress.skipped)} to train, {metrics.skipped} to"
            " validate"
        )
    return metrics


def _open_log(
    setup: RunSetup, checkpoints: Checkpoints, stack: contextlib.ExitStack
) -> RunLog | None:
    """Print a run's first lines; return its log, or None for a complete log or a rank above 0."""
    plan, run_dir, processes = setup.plan, checkpoints.run_dir, setup.processes
    config, progress = plan.config, plan.record.progress
    implementation = describe_implementation(plan.model, config.compute, processes.device)
    for line in _introduction(plan, processes, run_dir, implementation):
        setup.console.say(line)
    rows = logs.read_rows(run_dir, progress.epoch) if plan.resumed_from else []
    ended = progress.epoch == config.schedule.epochs
    if not processes.is_main or (ended and any(row["phase"] == "final" for row in rows)):
        return None
    rows = [row for row in rows if row["phase"] != "final"]  # `finish` appends a new final row
    start = {
        "processes": processes.world_size,
        "from_step": progress.global_step,
        "implementation": implementation,
    }
    rundir.add_environment(run_dir, env.describe(processes.device) | start)
    log = RunLog(run_dir, rows, progress.global_step, config)
    stack.callback(log.close)
    if plan.resumed_from is None:
        for phase in ("initial", "model"):
            log.phase(phase, progress, plan.memory.phases[phase], checkpoints.elapsed_s)
    return log


def _introduction(
    plan: RunPlan, processes: Processes, run_dir: Path, implementation: str
) -> Iterator[str]:
    config, splits, batches = plan.config, plan.splits, plan.batches
    began, size = plan.record.identity.world_size, processes.world_size
    per_step = batches.images_per_step
    if began != size:
        yield (
            f"the run began with {began} processes: on {size} a step is"
            f" {batches.accumulate} x {batches.size} images on each"
        )
    yield (
        f"{config.model.model} on {config.data.data}: {len(splits.train)} images to train,"
        f" {len(splits.val)} to validate, {len(splits.classes)} classes"
        f" ({listed(splits.classes, 5)}); {per_step} images per step on each of {size} x"
        f" {processes.device}, {per_step * size} in all; writing to {run_dir}"
    )
    yield plan.origin
    yield f"stages run by {implementation}"
