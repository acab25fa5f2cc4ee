"""Evaluation: a loop over images that counts each of them once, on any number of processes."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tresnet.data import Loader
from tresnet.engine.console import Console
from tresnet.engine.distributed import Processes
from tresnet.errors import DataError
from tresnet.measure.throughput import ThroughputMeter


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Over all images of all processes.

    Attributes:
        images: How many were read and classified.
        loss: Mean cross-entropy, without label smoothing.
        top1: Percent whose class got the highest logit.
        top5: Percent whose class is among the highest 5 logits, or all if there are fewer classes.
        images_per_s: Summed over processes, loading included; None if it went too fast to tell.
        skipped: Unreadable files that were left out.
    """

    images: int
    loss: float
    top1: float
    top5: float
    images_per_s: float | None
    skipped: int

    @property
    def score(self) -> float:
        """What the best checkpoint is chosen by, in percent."""
        return self.top1

    def figures(self) -> dict[str, float]:
        """The columns of the log."""
        return {"val_loss": self.loss, "val_top1": self.top1, "val_top5": self.top5}

    def saved(self) -> dict[str, Any]:
        """What is kept beside the weights."""
        return {
            "top1": self.top1,
            "top5": self.top5,
            "loss": self.loss if math.isfinite(self.loss) else None,
        }

    def summary(self) -> str:
        """One line for people."""
        return f"top-1 {self.top1:.2f} %, top-5 {self.top5:.2f} %, loss {self.loss:.4f}"


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a pass over a split took.

    Attributes:
        images: How many were read, over all processes.
        images_per_s: Summed over processes, loading included; None if it went too fast to tell.
        skipped: Unreadable files that were left out.
    """

    images: int
    images_per_s: float | None
    skipped: int


def evaluate(
    predict: Callable[[Tensor], Tensor],
    loader: Loader,
    processes: Processes,
    *,
    to_device: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    class_map: list[int] | None = None,
    console: Console | None = None,
) -> Metrics:
    """Run a model over a split (a collective).

    Args:
        predict: From a batch as `to_device` gives it to logits (N, classes) in float32.
        loader: This process's share, in evaluation mode.
        processes: This process's place.
        to_device: Moves images and labels to the device.
        class_map: The model's class of each label; None where they are the same.
        console: Shows a bar; None for silence.

    Raises:
        DataError: No image could be read.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=processes.device)
    labels_of = None if class_map is None else torch.tensor(class_map, device=processes.device)

    def take(logits: Tensor, targets: Tensor) -> None:
        sums.add_(_batch_sums(logits, targets if labels_of is None else labels_of[targets]))

    ran = run_over(predict, loader, processes, to_device=to_device, take=take, console=console)
    loss, hits1, hits5 = (value / ran.images for value in processes.sum(*sums.tolist()))
    return Metrics(ran.images, loss, 100 * hits1, 100 * hits5, ran.images_per_s, ran.skipped)


def run_over(
    predict: Callable[[Tensor], Tensor],
    loader: Loader,
    processes: Processes,
    *,
    to_device: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    take: Callable[[Tensor, Tensor], None],
    console: Console | None = None,
) -> Ran:
    """Run a model over a split and hand each batch's logits and labels to `take` (a collective).

    Args:
        predict: From a batch as `to_device` gives it to logits (N, classes) in float32.
        loader: This process's share, in evaluation mode.
        processes: This process's place.
        to_device: Moves images and labels to the device.
        take: Given logits and labels on the device.
        console: Shows a bar; None for silence.

    Raises:
        DataError: No image could be read.
    """
    meter = ThroughputMeter(processes.device)
    if len(loader) == 1:  # otherwise the first batch, with start-up costs, is not timed
        meter.start()
    images_seen = 0
    bar = (console or Console(False, False)).bar("evaluating", len(loader))
    with bar, torch.inference_mode():
        for images, targets in loader:
            images, targets = to_device(images, targets)
            take(predict(images), targets)
            meter.step(len(images))
            images_seen += len(images)
            bar.advance()
    rate = meter.average_images_per_s()
    seen, rate, skipped = processes.sum(images_seen, rate or 0.0, len(loader.skipped))
    if seen == 0:
        raise DataError("expected images to evaluate, but none could be read")
    return Ran(int(seen), rate or None, int(skipped))


def _batch_sums(logits: Tensor, targets: Tensor) -> Tensor:
    """Sums over a batch of loss, top-1 hits and top-5 hits: (3,) in float64."""
    loss = functional.cross_entropy(logits, targets, reduction="sum")
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices == targets[:, None]
    return torch.stack([loss.double(), best[:, 0].sum().double(), best.sum().double()])
