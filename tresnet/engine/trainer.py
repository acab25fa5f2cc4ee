"""The training loop: epochs, their rows in the log, checkpoints, and what ends a run."""

import contextlib
import dataclasses
import itertools
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tresnet import env
from tresnet.checkpoints.load import load_checkpoint
from tresnet.checkpoints.save import save_checkpoint
from tresnet.data.loaders import Batch, Loader, usable_cores
from tresnet.engine import batch_size, rundir, state
from tresnet.engine.config import TrainConfig
from tresnet.engine.console import Bar, Console
from tresnet.engine.distributed import Processes
from tresnet.engine.evaluate import Metrics, MultiLabelMetrics, evaluate
from tresnet.engine.images import Splits, set_training_size
from tresnet.engine.logs import RunLog, in_words, read_rows
from tresnet.engine.losses import Losses, Tally
from tresnet.engine.picture import draw
from tresnet.engine.signals import StopRequest
from tresnet.engine.state import BEST, LAST, PREVIOUS, Record
from tresnet.errors import DataError, InputError, TrainingError, WriteError
from tresnet.measure.memory import MemoryMeter, MemorySnapshot
from tresnet.measure.throughput import ThroughputMeter
from tresnet.steps import InferenceStep, TrainingStep

STALL_PCT = 10


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        run_dir: Where it wrote.
        metrics: Of the best checkpoint, read back from its file; None if the run was stopped.
        best_epoch: The epoch it is from, counted from 1; 0 if there was no evaluation yet.
        last_score: Top-1 accuracy, or mAP where images have several labels, of the last
            evaluation in percent; -1 if there was none.
        stopped_by: The signal that stopped the run early, or 0.
    """

    run_dir: Path
    metrics: Metrics | MultiLabelMetrics | None
    best_epoch: int
    last_score: float
    stopped_by: int = 0


class Trainer:
    """One run, from its first or a restored epoch to its end."""

    def __init__(
        self,
        record: Record,
        config: TrainConfig,
        passes: int,
        run_dir: Path,
        processes: Processes,
        splits: Splits,
        loaders: tuple[Loader, Loader],
        step: TrainingStep,
        losses: Losses,
        memory: MemoryMeter,
        stop: StopRequest,
        console: Console,
    ) -> None:
        """Bring the parts together; nothing is written yet.

        `config` is that of the record for as many processes as there are now, with which an epoch
        has so many `passes`.
        """
        self.record = record
        self.config, self.progress = config, record.progress
        self.passes = passes
        self.run_dir = run_dir
        self.processes = processes
        self.splits = splits
        self.train_loader, self.val_loader = loaders
        self.step = step
        self.tested = InferenceStep(
            step.averaged, self.config.compute, processes.device, say=console.say
        )
        self.memory = memory
        self.stop = stop
        self.losses = losses
        self.throughput = ThroughputMeter(processes.device)
        self.console = console
        self.tally = Tally()
        self.log: RunLog | None = None
        self._told_of_stall = False
        self._resumed_at = self._saved_update = record.progress.update
        self._saved_s = time.monotonic()
        self._started_s = self._saved_s - record.progress.elapsed_s

    def run(self) -> TrainResult:
        """Train the epochs that remain and evaluate the best checkpoint."""
        self._introduce()
        if self.processes.is_main:
            self._open_log()
        stopped_by = 0
        while self.progress.epoch < self.config.schedule.epochs and not stopped_by:
            stopped_by = self._train_epoch()
            if not stopped_by:
                self._finish_epoch()
        stopped_by = stopped_by or self._poll(None)[0]
        if not stopped_by and not self.progress.best_epoch:
            self._keep_as_best(self._evaluate(), self.progress.epoch)
        metrics = None if stopped_by else self._finish_run()
        if stopped_by:
            self.console.say(
                f"stopped by {signal.Signals(stopped_by).name} after update {self.progress.update},"
                f" saved; go on with: --resume {self.run_dir}"
            )
        best_epoch, last_score = self.progress.best_epoch, self.progress.last_score
        return TrainResult(self.run_dir, metrics, best_epoch, last_score, stopped_by)

    def close(self) -> None:
        """Stop the processes that load images, and write out what the log holds back."""
        self.train_loader.close()
        self.val_loader.close()
        if self.log is not None:
            self.log.close()

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Add to what ends a run where it can be gone on with."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            message = batch_size.explain_full_memory(
                error, self.config, self.splits.classes, self.processes, self.last_good()
            )
            raise TrainingError(message) from error
        except DataError as error:
            raise DataError(f"{error}; {self.last_good()}") from error
        except InputError:  # of its first batch, such as one that is too small
            self._discard_if_new()
            raise
        except WriteError as error:
            message = f"{error}; {self.last_good()}"
            self._discard_if_new()
            raise WriteError(message) from error

    def last_good(self) -> str:
        """Where the last checkpoint is, in words."""
        if not self._has_state():
            return "there is no checkpoint yet"
        return (
            f"the last good checkpoint is {self.run_dir / LAST}, of update {self._saved_update}:"
            f" go on with --resume {self.run_dir}"
        )

    def _discard_if_new(self) -> None:
        """Free the name of a run of which there is nothing to go on with."""
        if self.processes.is_main and not self._has_state() and not self._resumed_at:
            rundir.discard(self.run_dir)

    def _has_state(self) -> bool:
        return any((self.run_dir / name).exists() for name in (LAST, PREVIOUS))

    def _introduce(self) -> None:
        config, splits = self.config, self.splits
        began = self.record.identity.world
        if began != self.processes.world:
            self.console.say(
                f"the run began with {began} processes: on {self.processes.world} an update is"
                f" {config.optim.accumulate} x {config.data.batch_size} images on each"
            )
        per_update = config.data.resolved_batch_size * config.optim.accumulate
        self.console.say(
            f"{config.model.model} on {config.data.data}: {len(splits.train)} images to train,"
            f" {len(splits.val)} to validate, {len(splits.classes)} classes;"
            f" {per_update} images per update on each of {self.processes.world} x"
            f" {self.processes.device}, {per_update * self.processes.world} in all;"
            f" writing to {self.run_dir}"
        )
        if len(splits.classes) == 1 and not config.labels.multi:
            self.console.say(
                f"warning: expected at least 2 classes, got 1 ({splits.classes[0]}): whatever the"
                " model learns, its loss is 0 and its accuracy 100 %"
            )

    def _open_log(self) -> None:
        """Open the log, unless the run has ended already."""
        config, rows = self.config, []
        if self._has_state():
            rows = read_rows(self.run_dir, self.progress.epoch)
        if any(row["phase"] == "final" for row in rows):
            return
        rundir.add_environment(
            self.run_dir,
            env.describe(self.processes.device)
            | {"processes": self.processes.world, "from_step": self.progress.update},
        )
        run = config.run
        self.log = RunLog(
            *(self.run_dir, rows, self.progress.update, run.tensorboard, run.track),
            config=config.to_dict(),
        )
        if not rows:
            for phase in ("initial", "model"):
                self._row(phase, self.memory.phases[phase])

    def _train_epoch(self) -> int:
        """Train the rest of the epoch under way; returns a signal's number if one stopped it."""
        progress, loader = self.progress, self.train_loader
        if set_training_size(self.config, self.splits, progress.epoch):
            loader.close()  # its workers know the size before
        loader.set_epoch(progress.epoch, progress.batch)
        self.throughput.reset()
        self.throughput.start()
        title = f"epoch {progress.epoch + 1}/{self.config.schedule.epochs}"
        with self.console.bar(title, self.passes, progress.batch) as bar:
            batches = itertools.islice(loader, self.passes - progress.batch)
            while True:
                group, failure = self._fetch(batches)
                stopped_by, due, failed = self._poll(failure)
                if stopped_by or failed or (due and progress.update != self._saved_update):
                    self._look(bar)
                    self._save_state()
                if failed:
                    raise failure or DataError("another process could not read its images")
                if stopped_by or not group:
                    break
                self._update(group, bar)
                if progress.update % self.config.run.log_interval == 0:
                    self._look(bar)
            self._look(bar)
        return stopped_by

    def _fetch(self, batches: Iterator[Batch]) -> tuple[list[Batch], DataError | None]:
        """The batches of the next update, none at the epoch's end, or why they cannot be read.

        They are fetched before anything is computed, so that a failure finds all processes, their
        weights and their random generators between two updates.
        """
        try:
            return list(itertools.islice(batches, self.config.optim.accumulate)), None
        except DataError as error:
            return [], error

    def _update(self, group: list[Batch], bar: Bar) -> None:
        """Forward and backward of each batch, then one update of the weights."""
        progress = self.progress
        for images, labels in group:
            self.throughput.data_ready()
            number = progress.epoch * self.passes + progress.batch
            progress.batch += 1
            count, is_last = len(images), images is group[-1][0]
            images, labels = self.step.feed(images, labels)
            images, targets, criterion = self.losses.prepare(images, labels, progress.epoch, number)
            loss, logits = self.step.backward(images, targets, criterion, len(group), is_last)
            self.tally.add(progress.update + 1, loss, logits, labels)
            if is_last:
                progress.update += 1
                if not self._skip_if_bad():
                    self.step.update(progress.update)
            self.throughput.step(count)
            bar.advance()

    def _skip_if_bad(self) -> bool:
        """Leave the update out on all processes if it is bad on any, as often as allowed."""
        progress, allowed = self.progress, self.config.run.skip_bad_steps
        if not allowed or not self.processes.max(self.step.is_bad())[0]:
            return False
        if progress.bad_steps == allowed:
            raise TrainingError(
                "the loss or its gradient is not finite (nan or infinite) at update"
                f" {progress.update}, in epoch {progress.epoch + 1}, and {allowed} such updates"
                f" were skipped before, as many as --skip-bad-steps allows: {self.last_good()}."
                " Try a lower --lr or --clip-grad"
            )
        progress.bad_steps += 1
        self.tally.drop(progress.update)
        self.step.skip()
        self.console.say(
            f"update {progress.update} skipped: its loss or gradient is not finite"
            f" ({progress.bad_steps} of {allowed} that may be)"
        )
        return True

    def _look(self, bar: Bar) -> None:
        """Read the figures of the last batches, stop if they are not finite, and show them."""
        look = self.tally.look(self.processes)
        progress = self.progress
        if look.first_bad is not None:
            raise TrainingError(
                f"the loss is not finite (nan or infinite) at update {look.first_bad}, in epoch"
                f" {progress.epoch + 1}: {self.last_good()}. Try a lower --lr, --clip-grad,"
                " --amp bf16 in place of fp16, or --skip-bad-steps"
            )
        if look.images == 0:
            return
        progress.images += look.images
        progress.hits += look.hits
        for loss_sum in look.loss_sums:  # one by one: the same bits, whenever one looks
            progress.loss_sum += loss_sum
        figures = {"loss": sum(look.loss_sums) / look.images, "lr": self.step.lr}
        rate = self.throughput.images_per_s()
        if rate is not None:
            figures["images_per_s"] = rate * self.processes.world
            figures["data_wait_pct"] = 100 * (self.throughput.data_wait_fraction() or 0.0)
        if self.losses.has_accuracy(progress.epoch):
            figures["accuracy"] = 100 * look.hits / look.images
        at_interval = progress.update % self.config.run.log_interval == 0
        text = f"update {progress.update}  {in_words(figures)}  {_short(self.memory.snapshot())}"
        bar.note(text, line=at_interval)
        if self.log is not None and at_interval:
            self.log.scalars(progress.update, "update", figures)

    def _poll(self, failure: DataError | None) -> tuple[int, bool, bool]:
        """A signal that any process received, whether process 0 wants a checkpoint, any failure."""
        age_s = time.monotonic() - self._saved_s
        due = self.processes.is_main and age_s >= self.config.run.checkpoint_interval_s
        signum, *flags = self.processes.max(self.stop.signum, due, failure is not None)
        return int(signum), bool(flags[0]), bool(flags[1])

    def _finish_epoch(self) -> None:
        """Evaluate if it is time, write the epoch's row, and keep the best and the last state."""
        progress, config = self.progress, self.config
        memory = self.memory.phase("train")
        rates = [self.throughput.average_images_per_s(wait) or 0.0 for wait in (False, True)]
        rate, unhindered = self.processes.sum(*rates)
        waiting = 100 * (1 - rate / unhindered) if unhindered else None
        done = progress.epoch + 1
        is_last = done == config.schedule.epochs
        metrics = None
        if is_last or done % config.run.eval_interval == 0:
            self._save_state()  # should evaluation fail, the epoch is not lost
            metrics = self._evaluate()
        figures: dict[str, Any] = {"loss": progress.loss_sum / max(progress.images, 1)}
        if self.losses.has_accuracy(progress.epoch):
            figures["accuracy"] = 100 * progress.hits / max(progress.images, 1)
        figures |= {"lr": self.step.lr, "images_per_s": rate or None, "data_wait_pct": waiting}
        figures["bad_steps"] = progress.bad_steps
        if metrics is not None:
            progress.last_score = metrics.score
            figures |= metrics.figures()
            if (metrics.score, -metrics.loss) > (progress.best_score, -progress.best_loss):
                self._keep_as_best(metrics, done)
        progress.next_epoch()
        if self.log is not None:
            self._row("train", memory, **figures)
        self.console.say(
            f"epoch {done}/{config.schedule.epochs}  {in_words(figures)}  {_short(memory)}"
        )
        if waiting is not None and waiting >= STALL_PCT and not self._told_of_stall:
            self._told_of_stall = True
            self.console.say(_stall(waiting, config.data.workers, self.processes.world))
        self._save_state()

    def _evaluate(self) -> Metrics | MultiLabelMetrics:
        self.processes.share_buffers(self.step.averaged)
        return evaluate(
            self.config.labels,
            self.tested,
            self.val_loader,
            self.processes,
            console=self.console,
            levels=self.losses.levels,
        )

    def _keep_as_best(self, metrics: Metrics | MultiLabelMetrics, epoch: int) -> None:
        progress = self.progress
        progress.best_score, progress.best_loss = metrics.score, metrics.loss
        progress.best_epoch = epoch
        if not self.processes.is_main:
            return
        path = self.run_dir / BEST
        data = self.config.data
        save_checkpoint(
            self.step.averaged,
            path,
            metadata={
                "classes": self.splits.classes,
                "data": Path(data.data or "").name,
                "recipe": self.config.recipe,
                "epoch": self.progress.best_epoch,
                **metrics.saved(),
            },
        )

    def _save_state(self) -> None:
        """Write the last state, unless the weights have gone bad since the loss was looked at."""
        if not self.step.is_finite():
            raise TrainingError(
                f"the weights are not finite (nan or infinite) after update {self.progress.update}:"
                f" {self.last_good()}. Try a lower --lr or --clip-grad"
            )
        self.progress.elapsed_s = time.monotonic() - self._started_s
        skipped = self.processes.gather(set(self.train_loader.skipped))
        self.progress.skipped = tuple(sorted(set(self.progress.skipped).union(*skipped)))
        state.save(self.run_dir, self.step, self.record, self.processes)
        self._saved_s, self._saved_update = time.monotonic(), self.progress.update

    def _finish_run(self) -> Metrics | MultiLabelMetrics:
        """Read the best checkpoint back from its file, evaluate it, and show the result."""
        averaged = self.step.averaged
        if self.processes.is_main:
            load_checkpoint(averaged, self.run_dir / BEST)
        self.processes.share_state(averaged)
        metrics = self._evaluate()
        if self.log is not None:
            memory = self.memory.phase("final")
            rate = metrics.images_per_s
            self._row("final", memory, images_per_s=rate, **metrics.figures())
            self._draw(self.log.rows)
        self.console.say(
            f"result: {metrics.summary()} on {metrics.images} images with {self.run_dir / BEST}"
            f" (epoch {self.progress.best_epoch}; after the last epoch"
            f" {self.progress.last_score:.2f} %),"
            f" {self.progress.elapsed_s:.0f} s of training"
        )
        bad = self.progress.skipped
        if bad or metrics.skipped:
            self.console.say(
                f"unreadable images left out: {len(bad)} to train, {metrics.skipped} to validate"
            )
        return metrics

    def _draw(self, rows: list[dict[str, Any]]) -> None:
        title = f"{self.run_dir.resolve().name}: {self.config.model.model}, {self.config.recipe}"
        try:
            draw(self.run_dir, rows, title)
        except WriteError as error:
            self.console.say(f"warning: no picture of the run: {error}")

    def _row(self, phase: str, memory: MemorySnapshot, **figures: Any) -> None:
        assert self.log is not None, "process 0 alone writes rows"
        self.log.row(
            phase=phase,
            epoch=self.progress.epoch,
            step=self.progress.update,
            elapsed_s=time.monotonic() - self._started_s,
            **memory.to_dict(),
            **figures,
        )


def _stall(waiting_pct: float, workers: int, processes: int) -> str:
    """That data are what a run waits for, and how many workers would be enough.

    With w workers a batch takes 1 / w of what it takes to load; the rest of the time, without the
    waiting, is computing. Without workers loading and computing take turns.
    """
    waiting, cores = waiting_pct / 100, usable_cores()
    workers = min(workers, cores)
    needed = math.ceil((workers or waiting) / max(1 - waiting, 0.01))
    text = f"data is the bottleneck: {waiting_pct:.0f} % of the time was spent waiting for it"
    if needed * processes <= cores:
        return f"{text}; --workers {needed} would be enough (now {workers})"
    return (
        f"{text}; that would take {needed} workers for each of {processes} processes, but there are"
        f" {cores} cores: try smaller image files or less augmentation"
    )


def _short(memory: MemorySnapshot) -> str:
    """The one figure of memory that matters most: the peak, on the GPU if there is one."""
    peak = memory.peak_mib
    return "" if peak is None else f"{peak:.0f} MiB"
