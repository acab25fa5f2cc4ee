"""The training loop."""

import dataclasses
import datetime
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tresnet import env
from tresnet.checkpoints.load import load_checkpoint
from tresnet.checkpoints.save import save_checkpoint
from tresnet.data.seeding import mix_seed
from tresnet.engine import batch_size, distributed, rundir, state
from tresnet.engine import config as configs
from tresnet.engine.config import TrainConfig
from tresnet.engine.console import Bar, Console
from tresnet.engine.distributed import Processes
from tresnet.engine.evaluate import Metrics
from tresnet.engine.images import Images, open_images
from tresnet.engine.logs import RunLog
from tresnet.engine.losses import Losses
from tresnet.engine.multilabel import MultiLabelMetrics, evaluate_labels
from tresnet.engine.resolve import create_model, resolve
from tresnet.engine.signals import StopRequest
from tresnet.engine.state import BEST, LAST, Identity, Progress
from tresnet.engine.tally import Tally
from tresnet.engine.validate import validate
from tresnet.errors import TrainingError
from tresnet.measure.memory import MemoryMeter, MemorySnapshot
from tresnet.measure.throughput import ThroughputMeter
from tresnet.steps import InferenceStep, TrainingStep, create_training_step


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


def train(config: TrainConfig, resume: Path | None = None) -> TrainResult:
    """Train to the end, or until a signal asks to stop; under torchrun, with its other processes.

    Args:
        config: What to do. For a resumed run, the configuration it began with.
        resume: The directory of a run to go on with; None for a new run.

    Raises:
        ConfigError: The configuration does not fit, or differs from the resumed run's.
        DataError: The data set is incomplete or holds files that are not images.
        CheckpointError: Weights or a state cannot be read or written.
        TrainingError: The loss is no longer finite, the GPU's memory is full, or the log cannot be
            written.
    """
    validate(config)
    config = resolve(config)
    content = None
    if resume is not None:
        saved = configs.load(resume / rundir.CONFIG)
        config = configs.resumed(saved, config)
        configs.check_resumable(saved, config)
        content = state.load(resume / LAST)
    with StopRequest() as stop, distributed.join(config.compute.device) as processes:
        console = Console(processes.is_main, config.run.progress)
        config = batch_size.resolve(config, processes, console.say)
        memory = MemoryMeter(processes.device)
        memory.phase("initial")
        images = open_images(config, processes)
        state.seed_everything(config.run.seed, processes.device)
        model = create_model(config, images.classes)
        updates = -(-len(images.train) // config.optim.accumulate)
        step = create_step(model, config, processes, updates * config.schedule.epochs, console.say)
        memory.phase("model")
        state.seed_everything(mix_seed(config.run.seed, processes.rank), processes.device)
        run_dir = resume or _new_run_dir(config, processes)
        trainer = Trainer(config, run_dir, processes, images, step, memory, stop, console)
        if content is not None:
            trainer.restore(content)
        try:
            return trainer.run()
        except torch.OutOfMemoryError as error:
            message = batch_size.explain_full_memory(
                error, config, images.classes, processes, trainer.last_good()
            )
            raise TrainingError(message) from error
        finally:
            trainer.close()


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
        mixes=config.augment.mixes,
        say=say,
    )


def _new_run_dir(config: TrainConfig, processes: Processes) -> Path:
    now = datetime.datetime.now()
    return processes.from_main(rundir.create(config, now) if processes.is_main else None)


class Trainer:
    """One run, from its first or a restored epoch to its end."""

    def __init__(
        self,
        config: TrainConfig,
        run_dir: Path,
        processes: Processes,
        images: Images,
        step: TrainingStep,
        memory: MemoryMeter,
        stop: StopRequest,
        console: Console,
    ) -> None:
        """Bring the parts together; nothing is written yet."""
        self.config = config
        self.run_dir = run_dir
        self.processes = processes
        self.images = images
        self.step = step
        self.tested = InferenceStep(
            step.averaged, config.compute, processes.device, say=console.say
        )
        self.memory = memory
        self.stop = stop
        self.progress = Progress()
        self.identity = Identity(processes.world, images.fingerprint, images.classes)
        self.losses = Losses(config, len(images.classes), processes.rank)
        self.throughput = ThroughputMeter(processes.device)
        self.console = console
        self.tally = Tally()
        self.log: RunLog | None = None
        self._resumed = False
        self._started_s = self._saved_s = time.monotonic()

    def restore(self, content: dict[str, Any]) -> None:
        """Take over a loaded state.

        Raises:
            ConfigError: It belongs to other data or another number of processes.
        """
        self.progress = state.restore(content, self.step, self.identity, self.processes)
        self._started_s -= self.progress.elapsed_s
        self._resumed = True

    def run(self) -> TrainResult:
        """Train the epochs that remain and evaluate the best checkpoint."""
        self._open_log()
        epochs = self.config.schedule.epochs
        stopped_by = 0
        while self.progress.epoch < epochs and not stopped_by:
            stopped_by = self._train_epoch()
            if not stopped_by:
                self._finish_epoch()
                stopped_by = self._poll()[0]
        metrics = None if stopped_by else self._finish_run()
        if stopped_by:
            self._say_stopped(stopped_by)
        best_epoch, last_score = self.progress.best_epoch, self.progress.last_score
        return TrainResult(self.run_dir, metrics, best_epoch, last_score, stopped_by)

    def close(self) -> None:
        """Stop the processes that load images, and write out what the log holds back."""
        self.images.train.close()
        self.images.val.close()
        if self.log is not None:
            self.log.close()

    def _open_log(self) -> None:
        config, progress = self.config, self.progress
        per_update = config.data.resolved_batch_size * config.optim.accumulate
        self.console.say(
            f"{config.model.model} on {config.data.data}: {self.images.counts[0]} images to train,"
            f" {self.images.counts[1]} to validate, {len(self.images.classes)} classes;"
            f" {per_update} images per update on each of {self.processes.world} x"
            f" {self.processes.device}, {per_update * self.processes.world} in all;"
            f" writing to {self.run_dir}"
        )
        if not self.processes.is_main:
            return
        rundir.add_environment(
            self.run_dir,
            env.describe(self.processes.device)
            | {"processes": self.processes.world, "from_step": progress.update},
        )
        until = progress.update if self._resumed else None
        self.log = RunLog(self.run_dir, until, config.run.tensorboard)
        for phase in ("initial", "model"):
            self._row(phase, self.memory.phases[phase])

    def _train_epoch(self) -> int:
        """Train the rest of the epoch under way; returns a signal's number if one stopped it."""
        progress, loader = self.progress, self.images.train
        loader.set_epoch(progress.epoch, progress.batch)
        self.throughput.reset()
        self.throughput.start()
        title = f"epoch {progress.epoch + 1}/{self.config.schedule.epochs}"
        with self.console.bar(title, len(loader), progress.batch) as bar:
            for batch, (images, labels) in enumerate(loader, start=progress.batch):
                self.throughput.data_ready()
                is_update = self._pass(batch, images, labels)
                self.throughput.step(len(images))
                bar.advance()
                if not is_update:
                    continue
                if progress.update % self.config.run.log_interval == 0:
                    self._look(bar)
                stopped_by, save_now = self._poll()
                if stopped_by or save_now:
                    self._look(bar)
                    self._save_state()
                if stopped_by:
                    return stopped_by
            self._look(bar)
        return 0

    def _pass(self, batch: int, images: Tensor, labels: Tensor) -> bool:
        """One batch forward and backward; returns whether it completed an update."""
        progress, batches = self.progress, len(self.images.train)
        accumulate = self.config.optim.accumulate
        first = batch - batch % accumulate
        passes = min(accumulate, batches - first)
        is_last = batch == first + passes - 1
        images, labels = self.step.feed(images, labels)
        number = progress.epoch * batches + batch
        images, targets, criterion = self.losses.prepare(images, labels, progress.epoch, number)
        loss, logits = self.step.backward(images, targets, criterion, passes, is_last)
        self.tally.add(progress.update + 1, loss, logits, labels)
        if is_last:
            progress.update += 1
            self.step.update(progress.update)
            progress.batch = batch + 1
        return is_last

    def _look(self, bar: Bar) -> None:
        """Read the figures of the last batches, stop if they are not finite, and show them."""
        look = self.tally.look(self.processes)
        progress = self.progress
        if look.first_bad is not None:
            raise TrainingError(
                f"the loss is no finite number at update {look.first_bad}, in epoch"
                f" {progress.epoch + 1}: {self.last_good()}. Try a lower --lr, --clip-grad, or"
                " --amp bf16 in place of fp16"
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
        if self.losses.has_accuracy(progress.epoch):
            figures["accuracy"] = 100 * look.hits / look.images
        at_interval = progress.update % self.config.run.log_interval == 0
        text = f"update {progress.update}  {_format(figures)}  {_short(self.memory.snapshot())}"
        bar.note(text, line=at_interval)
        if self.log is not None and at_interval:
            self.log.scalars(progress.update, "update", figures)

    def _poll(self) -> tuple[int, bool]:
        """A signal that any process received, and whether process 0 wants a checkpoint."""
        age_s = time.monotonic() - self._saved_s
        due = age_s >= self.config.run.checkpoint_interval_s
        signum, due = self.processes.max(self.stop.signum, due and self.processes.is_main)
        return int(signum), bool(due)

    def _finish_epoch(self) -> None:
        """Evaluate if it is time, write the epoch's row, and keep the best and the last state."""
        progress, config = self.progress, self.config
        memory = self.memory.phase("train")
        rate = self.throughput.average_images_per_s() or 0.0
        (rate,) = self.processes.sum(rate)
        done = progress.epoch + 1
        is_last = done == config.schedule.epochs
        metrics = None
        if is_last or done % config.run.eval_interval == 0:
            self._save_state()  # should evaluation fail, the epoch is not lost
            metrics = self._evaluate()
        figures: dict[str, Any] = {"loss": progress.loss_sum / max(progress.images, 1)}
        if self.losses.has_accuracy(progress.epoch):
            figures["accuracy"] = 100 * progress.hits / max(progress.images, 1)
        figures |= {"lr": self.step.lr, "images_per_s": rate or None}
        if metrics is not None:
            progress.last_score = metrics.score
            figures |= metrics.figures()
            if (metrics.score, -metrics.loss) > (progress.best_score, -progress.best_loss):
                progress.best_score, progress.best_loss = metrics.score, metrics.loss
                progress.best_epoch = done
                self._save_best(metrics)
        progress.next_epoch()
        self._row("train", memory, **figures)
        self.console.say(
            f"epoch {done}/{config.schedule.epochs}  {_format(figures)}  {_short(memory)}"
        )
        self._save_state()

    def _evaluate(self) -> Metrics | MultiLabelMetrics:
        self.processes.share_buffers(self.step.averaged)
        return evaluate_labels(
            self.config.labels,
            self.tested,
            self.images.val,
            self.processes,
            console=self.console,
        )

    def _save_best(self, metrics: Metrics | MultiLabelMetrics) -> None:
        if not self.processes.is_main:
            return
        path = self.run_dir / BEST
        data = self.config.data
        save_checkpoint(
            self.step.averaged,
            path,
            metadata={
                "classes": self.images.classes,
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
                f"the weights are no finite numbers after update {self.progress.update}:"
                f" {self.last_good()}. Try a lower --lr or --clip-grad"
            )
        self.progress.elapsed_s = time.monotonic() - self._started_s
        state.save(self.run_dir / LAST, self.step, self.progress, self.identity, self.processes)
        self._saved_s = time.monotonic()

    def last_good(self) -> str:
        """Where the last checkpoint is, in words."""
        path = self.run_dir / LAST
        return (
            f"the last good checkpoint is {path}" if path.exists() else "there is no checkpoint yet"
        )

    def _finish_run(self) -> Metrics | MultiLabelMetrics:
        """Read the best checkpoint back from its file, evaluate it, and show the result."""
        averaged = self.step.averaged
        if self.processes.is_main:
            load_checkpoint(averaged, self.run_dir / BEST)
        self.processes.share_state(averaged)
        metrics = self._evaluate()
        memory = self.memory.phase("final")
        self._row("final", memory, images_per_s=metrics.images_per_s, **metrics.figures())
        self.console.say(
            f"result: {metrics.summary()} on {metrics.images} images with {self.run_dir / BEST}"
            f" (epoch {self.progress.best_epoch}; after the last epoch"
            f" {self.progress.last_score:.2f} %),"
            f" {self.progress.elapsed_s:.0f} s of training"
        )
        bad = {
            path
            for paths in self.processes.gather(set(self.images.train.skipped))
            for path in paths
        }
        if bad or metrics.skipped:
            self.console.say(
                f"unreadable images left out: {len(bad)} to train, {metrics.skipped} to validate"
            )
        return metrics

    def _say_stopped(self, signum: int) -> None:
        self.console.say(
            f"stopped by {signal.Signals(signum).name} after update {self.progress.update}, saved;"
            f" go on with: --resume {self.run_dir}"
        )

    def _row(self, phase: str, memory: MemorySnapshot, **figures: Any) -> None:
        if self.log is not None:
            self.log.row(
                phase=phase,
                epoch=self.progress.epoch,
                step=self.progress.update,
                elapsed_s=time.monotonic() - self._started_s,
                **memory.to_dict(),
                **figures,
            )


_FORMATS = {
    "loss": "loss {:.4f}",
    "accuracy": "accuracy {:.2f} %",
    "val_loss": "val loss {:.4f}",
    "val_top1": "top-1 {:.2f} %",
    "val_top5": "top-5 {:.2f} %",
    "val_map": "mAP {:.2f} %",
    "val_f1": "F1 {:.2f} %",
    "images_per_s": "{:.0f} images/s",
    "lr": "lr {:.3g}",
}


def _format(figures: dict[str, Any]) -> str:
    return "  ".join(
        text.format(figures[name])
        for name, text in _FORMATS.items()
        if figures.get(name) is not None
    )


def _short(memory: MemorySnapshot) -> str:
    """The one figure of memory that matters most: the peak, on the GPU if there is one."""
    peak = memory.max_allocated_mib if memory.rss_peak_mib is None else memory.rss_peak_mib
    return "" if peak is None else f"{peak:.0f} MiB"
