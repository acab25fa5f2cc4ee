"""Train the epochs of a run, with evaluations and checkpoints.

All micro-batches of an optimizer step are loaded before the step begins. Then the processes agree
whether to stop, save a checkpoint or raise an error, so checkpoints are saved between two steps.
"""

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from tresnet.cores import usable_cores
from tresnet.engine import rundir
from tresnet.engine.console import Bar
from tresnet.engine.distributed import StopRequest
from tresnet.engine.logs import RunLog, printed
from tresnet.engine.losses import LossMeter
from tresnet.engine.recovery import Checkpoints
from tresnet.engine.run import Run
from tresnet.engine.set_up import SetUpMeter
from tresnet.engine.splits import set_training_size
from tresnet.errors import DataError, OutputError
from tresnet.measure.throughput import ThroughputMeter
from tresnet.steps.feed import Batch, HostBatch
from tresnet.steps.freezing import describe_trained
from tresnet.steps.inference import describe_implementation

STALL_PCT = 10  # a warning is shown if waiting for data takes at least this percentage of time


class Loop:
    """Training loop over the remaining epochs of a run."""

    def __init__(
        self,
        run: Run,
        checkpoints: Checkpoints,
        log: RunLog | None,  # only on process 0
        stop: StopRequest,
    ) -> None:
        self.parts, self.checkpoints = run, checkpoints
        self.log, self.stop = log, stop
        self.config, self.progress = run.config, run.progress
        self.processes, self.console, self.step = run.processes, run.processes.console, run.step
        self.meter = LossMeter()
        self.throughput = ThroughputMeter(self.processes.device)
        self.set_up = SetUpMeter(self.parts.memory, self.config.step.compute, self.console.say)
        self._warned_of_stall = False
        self._implementation = self._describe()
        self._weights: deque[float | None] = deque()  # of the loaded optimizer steps' images

    def run(self) -> int:
        """Train; return the number of the signal that stopped the run, or 0."""
        while self.progress.epoch < self.config.schedule.epochs:
            stopped_by = self._train_epoch()
            if stopped_by:
                return stopped_by
            self._finish_epoch()
        return self._poll(None)[0]

    def _train_epoch(self) -> int:
        """Train the rest of the current epoch; return the number of a signal to stop, or 0."""
        progress, loader = self.progress, self.parts.train_loader
        per_epoch = self.parts.batches.per_epoch
        if set_training_size(self.config, self.parts.splits, progress.epoch):
            loader.close()  # workers would keep the former image size
        loader.set_epoch(progress.epoch, progress.micro_batches)
        self.throughput.reset()
        self.throughput.start()
        title = f"epoch {progress.epoch + 1}/{self.config.schedule.epochs}"
        with Bar(self.console, title, per_epoch, progress.micro_batches) as bar:
            rest = itertools.islice(loader, per_epoch - progress.micro_batches)
            batches = self.step.feed.ahead(self._in_groups(rest))
            while True:
                first, failure = None, None
                try:
                    first = next(batches, None)
                except DataError as error:
                    failure = error
                stopped_by, due, failed = self._poll(failure)
                if stopped_by or failed or due:
                    self._read_meter(bar)
                    self.checkpoints.save()
                if failed:  # every process says why, because torchrun shows any one of them
                    reasons = self.processes.gather(None if failure is None else str(failure))
                    raise failure or DataError(next(filter(None, reasons)))
                if stopped_by or first is None:  # None after the last batch
                    break
                self._optimizer_step(itertools.chain([first], batches), bar)
                if progress.global_step % self.config.run.log_interval == 0:
                    self._read_meter(bar)
            self._read_meter(bar)
        return stopped_by

    def _in_groups(self, batches: Iterator[HostBatch]) -> Iterator[HostBatch]:
        """Yield all batches one by one, but load those of an optimizer step at a time."""
        self._weights.clear()
        while group := list(itertools.islice(batches, self.parts.batches.accumulate)):
            self._weights.append(self.parts.losses.weight_of(labels for _, labels in group))
            yield from group

    def _poll(self, failure: DataError | None) -> tuple[int, bool, bool]:
        """Return the stop signal or 0, whether to save, and whether any process failed to load."""
        signum, due, failed = self.processes.max(
            self.stop.signum, self.checkpoints.are_due, failure is not None
        )
        return int(signum), bool(due), bool(failed)

    def _optimizer_step(self, batches: Iterator[Batch], bar: Bar) -> None:
        progress, plan = self.progress, self.parts.batches
        group = min(plan.accumulate, plan.per_epoch - progress.micro_batches)
        if (weight := self._weights.popleft()) is not None:
            (total,) = self.processes.sum(weight)
            self.parts.losses.begin_step(total, group * self.processes.world_size)
        for left, (images, labels) in zip(reversed(range(group)), batches, strict=False):
            self.throughput.data_ready()
            self.set_up.begin()
            index = progress.epoch * plan.per_epoch + progress.micro_batches
            progress.micro_batches += 1
            count, is_last = len(images), left == 0
            mixed, targets, criterion = self.parts.losses.prepare(
                images, labels, progress.epoch, index
            )
            loss, logits = self.step.backward(mixed, targets, criterion, group, is_last)
            # `global_step` grows after a step's last micro-batch, so this one is part of step + 1.
            self.meter.add(progress.global_step + 1, loss, logits, labels)
            if is_last:
                progress.global_step += 1
                if not self._skip_if_bad():
                    self.step.optimizer_step(progress.global_step)
            self.set_up.end(self.step.setting_up)
            if self.step.setting_up:
                self.throughput.start()  # leaves this micro-batch out
            else:
                self.throughput.step(count)
            bar.advance()

    def _describe(self) -> str:
        compute = self.config.step.compute
        return describe_implementation(self.step.model, compute, self.processes.device)

    def _tell_refusals(self) -> None:
        """Say which parts run as plain modules after all, once kernels have been refused."""
        if self.log is not None:
            before, self._implementation = self._implementation, self._describe()
            if self._implementation != before:
                self.console.say(f"stages run by {self._implementation}")
                record = {"implementation": self._implementation}
                rundir.add_environment(self.checkpoints.run_dir, record, amend=True)

    def _skip_if_bad(self) -> bool:
        """Skip a step with non-finite loss or gradient on some process; return True if skipped."""
        progress, allowed = self.progress, self.config.run.skip_bad_steps
        if not allowed or not self.processes.max(self.step.is_bad())[0]:
            return False
        if progress.bad_steps == allowed:
            raise self.checkpoints.diverged(
                f"after {allowed} skipped steps, as many as --skip-bad-steps allows, the loss or"
                f" its gradient is not finite at step {progress.global_step}, in epoch"
                f" {progress.epoch + 1}"
            )
        progress.bad_steps += 1
        self.meter.drop(progress.global_step)
        self.step.skip()
        self.console.say(
            f"step {progress.global_step} skipped: its loss or gradient is not finite"
            f" ({progress.bad_steps} of {allowed} allowed)"
        )
        return True

    def _read_meter(self, bar: Bar) -> None:
        """Show loss and speed since the last call; raise TrainingError if a loss is not finite."""
        progress = self.progress
        images, loss_sums, hits, first_bad = self.meter.read(self.processes)
        if first_bad is not None:
            raise self.checkpoints.diverged(
                f"the loss is not finite at step {first_bad}, in epoch {progress.epoch + 1}"
            )
        if images == 0:
            return
        self._tell_refusals()
        progress.images += images
        progress.hits += hits
        for loss_sum in loss_sums:  # one by one, so that a resumed run rounds in the same way
            progress.loss_sum += loss_sum
        figures = self._means(images, sum(loss_sums), hits)
        rate = self.throughput.images_per_s()
        if rate is not None:
            figures["images_per_s"] = rate * self.processes.world_size
            figures["data_wait_pct"] = 100 * (self.throughput.data_wait_fraction() or 0.0)
        figures["lr"] = self.step.lr
        at_interval = progress.global_step % self.config.run.log_interval == 0
        line = printed(figures, self.parts.memory.snapshot())
        bar.show(f"step {progress.global_step}  {line}", line=at_interval)
        if self.log is not None and at_interval:
            self.log.scalars(progress.global_step, "step", figures)

    def _means(self, images: int, loss_sum: float, hits: int) -> dict[str, Any]:
        """Return the mean loss of the current epoch's `images` and, if defined, their accuracy."""
        means = {"loss": loss_sum / images}
        if self.parts.losses.has_accuracy(self.progress.epoch):
            means["accuracy"] = 100 * hits / images
        return means

    def _finish_epoch(self) -> None:
        progress, epochs = self.progress, self.config.schedule.epochs
        memory = self.parts.memory.phase("train")
        rates = [self.throughput.mean_images_per_s(wait) or 0.0 for wait in (False, True)]
        rate, unhindered = self.processes.sum(*rates)
        waiting = 100 * (1 - rate / unhindered) if unhindered else None
        figures = self._means(max(progress.images, 1), progress.loss_sum, progress.hits)
        figures |= {"images_per_s": rate or None, "data_wait_pct": waiting, "lr": self.step.lr}
        figures |= {"set_up_s": self.set_up.take_epoch_s(), "bad_steps": progress.bad_steps}
        done = progress.epoch + 1
        if done == epochs or done % self.config.run.eval_interval == 0:
            self.checkpoints.save()  # saves the epoch in case the evaluation fails
            figures |= self._evaluate(done)
        progress.next_epoch()
        if self.log is not None:
            self.log.phase("train", progress, memory, self.checkpoints.elapsed_s, **figures)
        self.console.say(f"epoch {done}/{epochs}  {printed(figures, memory)}")
        if waiting is not None and waiting >= STALL_PCT and not self._warned_of_stall:
            self._warned_of_stall = True
            workers = self.config.data.workers
            side, rgb = 0, self.config.in_chans == 3
            with contextlib.suppress(DataError):  # the first image may be unreadable
                side = min(self.parts.splits.train.encoded_image(0).size)
            processes = self.processes.world_size
            self.console.say(stall_warning(waiting, workers, processes, side, rgb=rgb))
        if progress.epoch == self.config.schedule.freeze_epochs:
            self._thaw()
        self.checkpoints.save()

    def _thaw(self) -> None:
        """Train more than the head from now on. States of the epochs before have its optimizer."""
        self.step.train_only(self.config.trained_parts(self.progress.epoch))
        torch.cuda.empty_cache()  # of the former CUDA graphs; a no-op without CUDA
        self.console.say(f"epoch {self.progress.epoch + 1}: {describe_trained(self.step.model)}")

    def _evaluate(self, epoch: int) -> dict[str, float | None]:
        progress = self.progress
        try:
            metrics = self.parts.evaluate()
        except OutputError as error:
            progress.last_score = math.nan
            self.console.say(f"epoch {epoch} cannot become the best: {error}")
            return {}
        progress.last_score = metrics.score
        if (metrics.score, -metrics.loss) > (progress.best_score, -progress.best_loss):
            self.checkpoints.save_best(metrics, epoch)
        return metrics.figures()


def stall_warning(
    waiting_pct: float, workers: int, processes: int, side: int, *, rgb: bool = True
) -> str:
    """Return a warning about waiting for data, with its remedies in the order of their effect.

    `side` is the shorter side of an image in pixels. Smaller ones than 256 cannot be shrunk to it.
    `tresnet shard` takes only images in RGB.
    """
    busy, most = min(workers, usable_cores()), usable_cores() // processes
    needed = 100 / max(100 - waiting_pct, 1)
    # Without workers, this process loads images in the part of the time that it waits.
    loading = busy or waiting_pct / 100
    enough = min(math.ceil(loading * needed), most)
    # The factors of `tresnet shard` are in docs/training.md, "Loading images".
    remedies = [(7.0, "`tresnet shard --pixels`: x 7")] if rgb else []
    if rgb and side > 256:
        remedies.append((1.6, "`tresnet shard --short-side 256`: x 1.6"))
    if enough > busy:
        effect = enough / loading
        remedies.append((effect, f"--workers {enough} (now {busy}): x {effect:.1f}"))
    ordered = [text for _, text in sorted(remedies, reverse=True)]
    fact = (
        f"data is the bottleneck: {waiting_pct:.0f} % of the time was spent waiting for it, so"
        f" loading should be {needed:.1f} times as fast"
    )
    return "; ".join([fact, *ordered])
