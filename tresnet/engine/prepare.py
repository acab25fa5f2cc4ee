"""Second phase of a run: build the loaders, training step and losses of this process."""

import dataclasses
import os

import torch
from torch import nn

from tresnet.data.loaders import Loader
from tresnet.data.seeding import mix_seed
from tresnet.engine import state
from tresnet.engine.config import TrainConfig
from tresnet.engine.console import Console
from tresnet.engine.distill import create_teacher
from tresnet.engine.distributed import Processes
from tresnet.engine.evaluate import Metrics, MultiLabelMetrics, evaluate
from tresnet.engine.images import open_loader
from tresnet.engine.losses import Losses, class_weights
from tresnet.engine.plan import MicroBatches, RunPlan, Start
from tresnet.engine.state import Resumed
from tresnet.steps import InferenceStep, StepHost, StepSpec, TrainingStep
from tresnet.steps.compiled import Say, log


@dataclasses.dataclass(frozen=True)
class RunSetup:
    """Plan of a run, and this process's loaders, losses and steps for training and evaluation."""

    plan: RunPlan
    train_loader: Loader
    val_loader: Loader
    step: TrainingStep
    eval_step: InferenceStep
    losses: Losses
    processes: Processes
    console: Console

    def evaluate(self) -> Metrics | MultiLabelMetrics:
        """Evaluate the EMA if the run has one, else the model (a collective)."""
        labels = self.plan.config.labels
        # Processes train on different images, so running statistics differ: evaluate process 0's.
        self.processes.broadcast(self.step.eval_model.buffers())
        return evaluate(
            labels.threshold if labels.multi else None,
            self.eval_step,
            self.val_loader,
            self.processes,
            console=self.console,
            levels=self.losses.levels,
        )

    def close(self) -> None:
        self.train_loader.close()
        self.val_loader.close()


def prepare(plan: RunPlan, start: Start, processes: Processes, console: Console) -> RunSetup:
    """Build the `RunSetup` of this process, and restore the state of a resumed run."""
    config, classes, seed = plan.config, plan.splits.classes, plan.config.run.seed
    data, splits, size = config.data, plan.splits, plan.batches.size
    order = {"repeats": config.augment.aug_repeats, "seed": seed}
    train_loader = open_loader(data, splits.train, size, processes, training=True, **order)
    val_loader = open_loader(data, splits.val, size, processes, training=False)
    if config.compute.deterministic:
        # The first call of cuBLAS reads this variable, so it is set before the model runs.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)
    # Each process chooses its CUDA graphs, and one that runs eagerly slows all others down.
    prefix = f"process {processes.rank}: " if processes.world_size > 1 else ""
    step = create_step(
        plan.model,
        config,
        processes,
        plan.batches,
        say=console.say,
        warn=lambda text: console.warn(f"{prefix}{text}"),
    )
    teacher = create_teacher(config, classes, processes.device)
    weights = class_weights(config, splits.train)
    weights = None if weights is None else weights.to(processes.device)
    losses = Losses(config, classes, processes.rank, teacher, weights)
    plan.memory.phase("model")
    # Each process has its own seed, so that dropout masks differ. `restore` may set other states.
    state.seed_everything(mix_seed(seed, processes.rank), processes.device)
    if isinstance(start, Resumed):
        state.restore(start.state, step, processes)
    eval_step = InferenceStep(step.eval_model, config.compute, processes.device, say=console.say)
    return RunSetup(plan, train_loader, val_loader, step, eval_step, losses, processes, console)


def create_step(
    model: nn.Module,
    config: TrainConfig,
    processes: Processes,
    batches: MicroBatches,
    *,
    say: Say = log,
    warn: Say | None = None,
) -> TrainingStep:
    """Return the training step of a complete configuration."""
    spec = StepSpec(
        compute=config.compute,
        optim=dataclasses.replace(config.optim, accumulate=batches.accumulate),
        ema=config.ema,
        schedule=config.schedule,
        total_steps=batches.steps_per_epoch * config.schedule.epochs,
        global_batch=batches.images_per_step * processes.world_size,
        sync_bn=config.compute.sync_bn,
        grad_checkpointing=config.model.grad_checkpointing,
        mixes=config.augment.mixes or config.distill.teacher is not None,
        skips=config.run.skip_bad_steps > 0,
    )
    host = StepHost(device=processes.device, world_size=processes.world_size, say=say, warn=warn)
    return TrainingStep(model, spec, host)
