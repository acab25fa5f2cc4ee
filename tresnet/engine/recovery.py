"""Save the checkpoints of a run, and say how to continue if the run ends early."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from tresnet.checkpoints.save import save_checkpoint
from tresnet.engine import full_memory, rundir, state
from tresnet.engine.evaluate import Metrics, MultiLabelMetrics
from tresnet.engine.plan import RunPlan
from tresnet.engine.prepare import Parts
from tresnet.engine.state import BEST
from tresnet.errors import DataError, TrainingError, TResNetError, WriteError


class Checkpoints:
    """Writes states and the best weights to a run's directory, and explains errors."""

    def __init__(self, run_dir: Path, plan: RunPlan, parts: Parts) -> None:
        self.run_dir = run_dir
        self._plan, self._parts = plan, parts
        self._progress = plan.record.progress
        self._saved_step = self._progress.global_step if plan.resumed_from else None
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
            self._parts.processes.is_main
            and age_s >= self._plan.config.run.checkpoint_interval_s
            and self._progress.global_step != (self._saved_step or 0)
        )

    def save(self) -> None:
        """Write the state of all processes (a collective); NaN or inf weights raise an error."""
        progress, processes = self._progress, self._parts.processes
        if not self._parts.step.is_finite():
            raise self.diverged(f"the weights are not finite after step {progress.global_step}")
        progress.elapsed_s = self.elapsed_s
        skipped = processes.gather(set(self._parts.train_loader.skipped))
        progress.skipped = tuple(sorted(set(progress.skipped).union(*skipped)))
        state.save(self.run_dir, self._parts.step, self._plan.record, processes)
        self._saved_s, self._saved_step = time.monotonic(), progress.global_step

    def save_best(self, metrics: Metrics | MultiLabelMetrics, epoch: int) -> None:
        """Save the evaluated weights as the best so far; `epoch` counts from 1."""
        progress, config = self._progress, self._plan.config
        progress.best_score, progress.best_loss = metrics.score, metrics.loss
        progress.best_epoch = epoch
        if self._parts.processes.is_main:
            save_checkpoint(
                self._parts.step.eval_model,
                self.run_dir / BEST,
                metadata={
                    "classes": self._plan.splits.classes,
                    "data": Path(config.data.data or "").name,
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
            f"{fact} (nan or infinite): {self.last_good()}. Try a lower --lr, --clip-grad, --amp"
            " bf16 in place of fp16, or more --skip-bad-steps"
        )

    @contextlib.contextmanager
    def adding_advice(self) -> Iterator[None]:
        """If the block fails, say how to resume; discard the run's directory if it has no state."""
        try:
            yield
        except (TResNetError, torch.OutOfMemoryError) as error:
            advised = self._with_advice(error)
            if self._parts.processes.is_main and self._saved_step is None:
                rundir.discard(self.run_dir)
            raise advised from error.__cause__  # the new message contains that of `error`

    def _with_advice(self, error: Exception) -> Exception:
        if isinstance(error, torch.OutOfMemoryError):
            plan, processes = self._plan, self._parts.processes
            return TrainingError(full_memory.advice(error, plan, processes, self.last_good()))
        if isinstance(error, DataError | WriteError):
            return type(error)(f"{error}; {self.last_good()}")
        return error
