"""Save the checkpoints of a run, and say how to continue if the run ends early."""

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from tresnet.checkpoints.save import save_checkpoint
from tresnet.engine import rundir, state
from tresnet.engine.batch_size import MicroBatches, largest_divisor
from tresnet.engine.config import Resolved
from tresnet.engine.evaluate import Metrics, MultiLabelMetrics
from tresnet.engine.run import Run
from tresnet.engine.state import BEST
from tresnet.errors import DataError, TrainingError, TResNetError, WriteError
from tresnet.settings import sides


class Checkpoints:
    """Writer of a run's checkpoints and best weights; its errors say how to continue the run."""

    def __init__(self, run_dir: Path, run: Run) -> None:
        self.run_dir = run_dir
        self._run, self._progress = run, run.progress
        self._saved_step = self._progress.global_step if run.resumed_from else None
        self._saved_s = time.monotonic()
        self._started_s = self._saved_s - self._progress.elapsed_s

    @property
    def elapsed_s(self) -> float:
        """Seconds of training so far, including those before the run was resumed."""
        return time.monotonic() - self._started_s

    @property
    def are_due(self) -> bool:
        """Whether process 0 should save a checkpoint now; always False on other processes."""
        age_s = time.monotonic() - self._saved_s
        return (
            self._run.processes.is_main
            and age_s >= self._run.config.run.checkpoint_interval_s
            and self._progress.global_step != (self._saved_step or 0)
        )

    def save(self) -> None:
        """Save the training state (a collective); NaN or infinite weights raise TrainingError."""
        run, progress, processes = self._run, self._progress, self._run.processes
        if not run.step.is_finite():
            raise self.diverged(f"the weights are not finite after step {progress.global_step}")
        progress.elapsed_s = self.elapsed_s
        skipped = processes.gather(set(run.train_loader.skipped))
        progress.skipped = tuple(sorted(set(progress.skipped).union(*skipped)))
        state.save(self.run_dir, run.step, run.config, run.identity, progress, processes)
        self._saved_s, self._saved_step = time.monotonic(), progress.global_step

    def save_best(self, metrics: Metrics | MultiLabelMetrics, epoch: int) -> None:
        """Save the evaluated weights as the best so far; `epoch` counts from 1."""
        progress, config = self._progress, self._run.config
        progress.best_score, progress.best_loss = metrics.score, metrics.loss
        progress.best_epoch = epoch
        if self._run.processes.is_main:
            save_checkpoint(
                self._run.step.eval_model,
                self.run_dir / BEST,
                metadata={
                    "classes": self._run.splits.classes,
                    "data": Path(config.data.data).name,
                    "recipe": config.recipe,
                    "epoch": epoch,
                    **metrics.saved(),
                },
            )

    def last_good(self) -> str:
        """Return a text that names the last checkpoint and the option to resume from it."""
        if self._saved_step is None:
            return "there is no checkpoint yet"
        return (
            f"the last good checkpoint is of step {self._saved_step}: continue with --resume"
            f" {self.run_dir}"
        )

    def diverged(self, fact: str) -> TrainingError:
        """Return the error for values that are not finite; its message begins with `fact`."""
        name, teacher = self._run.config.distill.teacher, self._run.losses.teacher
        if teacher is not None and teacher.failed:
            return TrainingError(
                f"the outputs of --teacher {name} are not finite, so {fact}: {self.last_good()};"
                " start a new run with another --amp, such as off, or another teacher"
            )
        return TrainingError(
            f"{fact} (nan or infinite): {self.last_good()}; try more --skip-bad-steps, or in a new"
            " run a lower --lr, --clip-grad or another --amp"
        )

    @contextlib.contextmanager
    def adding_advice(self) -> Iterator[None]:
        """After an error, add advice to it, and remove a run directory that has no checkpoint."""
        try:
            yield
        except (TResNetError, torch.OutOfMemoryError) as error:
            advised: Exception = error
            if isinstance(error, torch.OutOfMemoryError):
                advised = self._full_memory(error)
            elif isinstance(error, DataError | WriteError):
                advised = type(error)(f"{error}; {self.last_good()}")
            if self._run.processes.is_main and self._saved_step is None:
                rundir.discard(self.run_dir)
            raise advised from error.__cause__  # the new message contains that of `error`

    def _full_memory(self, error: torch.OutOfMemoryError) -> TrainingError:
        config, batches = self._run.config, self._run.batches
        fits = f"what fits a GPU without other processes, predicted: {max_batch_command(config)}"
        predicted = f"  {fits}\n" if config.in_chans == 3 else ""  # the prediction is for RGB
        return TrainingError(
            f"the GPU's memory is full with --batch-size {batches.size}: {error}\n"
            f"  {self.last_good()}\n"
            f"{predicted}"
            "  a resumed run keeps its options; for a new run, try"
            f" {'; or '.join(remedies(config, batches))}"
        )


def max_batch_command(config: Resolved) -> str:
    """Return the command that predicts the largest batch with which the run's step would fit."""
    step, sizes = config.step, (config.data.input_size, *config.data.sizes)
    options = {
        "input-size": " ".join(map(str, max(map(sides, sizes), key=math.prod))),
        "input": "uint8",
        "norm": step.build.norm,
        "recompute": step.build.recompute,
        "amp": step.compute.amp,
        "opt": step.optim.opt,
        "accumulate": step.optim.accumulate,
        "train-only": step.optim.train_only and " ".join(step.optim.train_only),
        "ema-decay": step.ema.ema_decay,
        "gpu-memory": config.machine.gpu_memory,
    }
    given = [f"--{name} {value}" for name, value in options.items() if value is not None]
    given += ["--grad-checkpointing"] * step.build.grad_checkpointing
    return f"tresnet memory max-batch {config.model} {' '.join(given)}"


def remedies(config: Resolved, batches: MicroBatches) -> Iterator[str]:
    """Yield options that save memory."""
    images, pairs = batches.images_per_step, config.augment.mixes
    if size := largest_divisor(batches.size, batches.size // 2, pairs=pairs):
        yield (
            f"--batch-size {size} --accumulate {images // size}, which keeps {images} images per"
            " step"
        )
    if config.step.compute.amp == "off":
        yield "--amp auto"
    if config.step.build.norm != "abn":
        yield "--norm abn"
    if not config.step.build.grad_checkpointing:
        yield "--grad-checkpointing"
    yield "a smaller --input-size or --model"
