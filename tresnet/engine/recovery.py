"""Save the checkpoints of a run, and say how to continue if the run ends early."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from tresnet.checkpoints.save import checkpoint_metadata, save_checkpoint
from tresnet.engine import batch_size, rundir, state
from tresnet.engine.batch_size import MicroBatches
from tresnet.engine.config import TrainConfig
from tresnet.engine.evaluate import Metrics, MultiLabelMetrics
from tresnet.engine.run import Run, rebuild_model
from tresnet.engine.state import BEST
from tresnet.errors import DataError, TrainingError, TResNetError, WriteError


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
        run, fitting = self._run, None
        config, size = run.config, run.batches.size
        try:
            model = rebuild_model(config, checkpoint_metadata(run.step.model))
            answer = batch_size.largest(model, config, run.splits.classes, run.processes)
            fitting = answer.batch_size
            outlook = f"predicted to fit on this {answer.device.name}: {fitting} images at most"
            if fitting >= size:
                outlook += ", yet these did not: look for other processes on the GPU"
        except (TResNetError, RuntimeError) as second:  # added to the message
            outlook = f"what would fit cannot be predicted: {second}"
        return TrainingError(
            f"the GPU's memory is full with --batch-size {size}: {error}\n  {self.last_good()}\n"
            f"  {outlook}\n  a resumed run keeps its options; for a new run, try"
            f" {'; or '.join(remedies(config, run.batches, fitting))}"
        )


def remedies(config: TrainConfig, batches: MicroBatches, fitting: int | None) -> Iterator[str]:
    """Yield options that save memory; `fitting` is the largest batch predicted to fit, if known."""
    full, pairs = batches.size, config.augment.mixes
    limit = full // 2 if fitting is None or fitting >= full else fitting
    size = batch_size.largest_divisor(full, limit, pairs=pairs)
    if size and size >= limit / 2:
        yield (
            f"--batch-size {size} --accumulate {batches.images_per_step // size}, which"
            f" keeps {batches.images_per_step} images per step"
        )
    elif smaller := batch_size.round_down(limit, pairs=pairs):
        yield f"--batch-size {smaller}"
    if config.step.compute.amp == "off":
        yield "--amp auto"
    if config.step.build.norm != "abn":
        yield "--norm abn"
    if not config.step.build.grad_checkpointing:
        yield "--grad-checkpointing"
    yield "a smaller --input-size or --model"
