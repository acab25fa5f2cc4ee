"""Evaluate a model so that each image counts once, on any number of processes."""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tresnet.data.loaders import Loader
from tresnet.engine.console import Bar
from tresnet.engine.distributed import Processes
from tresnet.engine.per_class import ClassCounter
from tresnet.engine.score_store import PAIR_BYTES, ScoreStore
from tresnet.errors import DataError
from tresnet.measure.throughput import ThroughputMeter
from tresnet.settings import Threshold
from tresnet.steps import InferenceStep
from tresnet.steps.outputs import finite, not_finite, present, probabilities, ranked

_BLOCK_BYTES = 2**27  # of scores and labels of some classes of all images, which are read at once
_MARGIN = 1e-4  # of thresholds that are found below the probability of an image


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Metrics of a split with one label per image, over all processes."""

    images: int
    loss: float  # mean cross-entropy without label smoothing
    top1: float  # percent
    top5: float | None  # percent; None with at most 5 classes
    images_per_s: float | None = None  # includes loading; None if too fast to measure
    skipped: int = 0  # number of unreadable files

    @property
    def score(self) -> float:
        """Top-1 accuracy in percent, which decides the best checkpoint."""
        return self.top1

    def figures(self) -> dict[str, float | None]:
        """Return the metrics as columns of the log."""
        return {"val_loss": self.loss, "val_top1": self.top1, "val_top5": self.top5}

    def saved(self) -> dict[str, Any]:
        """Return the metrics to save as metadata of the weights."""
        loss = self.loss if math.isfinite(self.loss) else None
        return {"top1": self.top1, "top5": self.top5, "loss": loss}

    def summary(self) -> str:
        top5 = "" if self.top5 is None else f" top-5 {self.top5:.2f} %,"
        return f"top-1 {self.top1:.2f} %,{top5} loss {self.loss:.4f}"


@dataclasses.dataclass(frozen=True)
class MultiLabelMetrics:
    """Metrics of a split with any number of labels per image, over all processes."""

    images: int
    loss: float  # mean binary cross-entropy over images and classes
    map: float  # mean average precision in percent, over classes with at least one image
    per_class_ap: tuple[float | None, ...]  # percent; None for a class that no image has
    f1_micro: float  # percent, over all labels together
    f1_macro: float  # percent, mean over the classes with at least one image
    threshold: Threshold  # lowest probability of a label that counts as predicted
    images_per_s: float | None = None  # includes loading; None if too fast to measure
    skipped: int = 0  # number of unreadable files

    @property
    def score(self) -> float:
        """Mean average precision in percent, which decides the best checkpoint."""
        return self.map

    def figures(self) -> dict[str, float | None]:
        return {"val_loss": self.loss, "val_map": self.map, "val_f1": self.f1_micro}

    def saved(self) -> dict[str, Any]:
        scores = {"map": self.map, "f1": self.f1_micro, "threshold": self.threshold}
        loss = self.loss if math.isfinite(self.loss) else None
        return {"labels": "multi", **scores, "loss": loss}

    def summary(self) -> str:
        at = self.threshold
        at = f"{min(at):.3g} to {max(at):.3g} by class" if isinstance(at, tuple) else f"{at:g}"
        return (
            f"mAP {self.map:.2f} %, F1 {self.f1_micro:.2f} % (macro {self.f1_macro:.2f} %) at"
            f" {at}, loss {self.loss:.4f}"
        )


def evaluate(
    threshold: Threshold | None,
    step: InferenceStep,
    loader: Loader,
    processes: Processes,
    output_order: list[int] | None = None,
    levels: Tensor | None = None,
    counter: ClassCounter | None = None,
    find_thresholds: bool = False,
) -> Metrics | MultiLabelMetrics:
    """Evaluate `step` on this process's images; return metrics over all processes (a collective).

    `threshold` is the lowest probability at which a label counts as predicted; None means one label
    per image. With `find_thresholds`, each class gets the threshold of its highest F1, if it has
    images. `output_order` has the index of the model's output for each label; other outputs are
    ignored. Without `output_order`, labels are output indices. `levels` (classes,) has each class's
    level in a hierarchy: an image's metrics use only the logits on the level of its label.
    `counter` receives all labels and predictions.
    DataError is raised if no image can be read, or if no image has a label. OutputError is raised
    if any logits are not finite.
    """
    sums = (
        _SingleLabelSums(processes.device, counter)
        if threshold is None
        else _MultiLabelSums(threshold, counter, find_thresholds, len(loader))
    )
    meter = ThroughputMeter(processes.device)
    if len(loader) == 1:  # with more batches, timing starts after the slow first batch
        meter.start()
    images_seen, bad = 0, torch.zeros((), dtype=torch.int64, device=processes.device)
    bar = Bar(processes.console, "evaluating", len(loader))
    with bar, torch.inference_mode():
        for images, targets in step.feed.ahead(loader):
            meter.data_ready()
            logits = step(images)
            bad += (~finite(logits)).sum()  # read at the end, because reading waits for a GPU
            if output_order is not None:
                logits = logits[:, output_order]  # leaves out classes that the data lack
            if levels is not None:
                levels = levels.to(logits.device)
                logits = logits.masked_fill(levels != levels[targets][:, None], -math.inf)
            sums.add(logits, targets)
            if step.setting_up:
                meter.start()  # leaves this batch out
            else:
                meter.step(len(images))
            images_seen += len(images)
            bar.advance()
    rate = meter.mean_images_per_s() or 0.0  # None cannot be summed over processes
    count, rate, skipped, useless = processes.sum(images_seen, rate, len(loader.skipped), int(bad))
    if count == 0:
        raise DataError("expected images to evaluate, but none could be read")
    if useless:
        raise not_finite(int(useless), int(count), step.compute)
    metrics = sums.metrics(processes, int(count))
    return dataclasses.replace(metrics, images_per_s=rate or None, skipped=int(skipped))


class _SingleLabelSums:
    def __init__(self, device: torch.device, counter: ClassCounter | None) -> None:
        self._counter = counter
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)
        self._classes = 0

    def add(self, logits: Tensor, targets: Tensor) -> None:
        self._classes = logits.shape[1]
        loss = functional.cross_entropy(logits, targets, reduction="sum")
        best = ranked(logits, 5)
        hits = best == targets[:, None]
        self._sums += torch.stack([loss.double(), hits[:, 0].sum().double(), hits.sum().double()])
        if self._counter is not None:
            self._counter.add(targets, best[:, 0])

    def metrics(self, processes: Processes, images: int) -> Metrics:
        loss, top1, top5 = (value / images for value in processes.sum(*self._sums.tolist()))
        return Metrics(images, loss, 100 * top1, 100 * top5 if self._classes > 5 else None)


class _MultiLabelSums:
    def __init__(
        self, threshold: Threshold, counter: ClassCounter | None, find: bool, batches: int
    ) -> None:
        self._threshold, self._counter, self._find = threshold, counter, find
        self._batches, self._store = batches, None

    def add(self, logits: Tensor, targets: Tensor) -> None:
        if self._store is None:
            self._store = ScoreStore(self._batches * len(logits), logits.shape[1])
        self._store.add(logits.float().cpu(), targets.cpu() > 0.5)

    def metrics(self, processes: Processes, images: int) -> MultiLabelMetrics:
        """Compute the metrics, of as many classes at once as take little memory."""
        classes = int(processes.max(0 if self._store is None else self._store.classes)[0])
        former = torch.tensor(self._threshold, dtype=torch.float64).expand(classes)
        thresholds: list[float] = former.tolist()
        precisions: list[float | None] = []
        predictions, counts, loss = [], [], 0.0
        step = max(1, _BLOCK_BYTES // (images * PAIR_BYTES))
        for begin in range(0, classes, step):
            block = slice(begin, begin + step)
            parts = processes.gather(self._store and self._store.read(begin, begin + step))
            logits, labels = (torch.cat(pair) for pair in zip(*filter(None, parts), strict=True))
            chances = probabilities(logits, multi=True)
            if self._find:
                columns = zip(chances.T, labels.T, thresholds[block], strict=True)
                thresholds[block] = [best_threshold(*column) for column in columns]
            predicted = present(chances, tuple(thresholds[block]))
            counts.append(label_counts(predicted, labels))
            precisions += map(average_precision, logits.T, labels.T)
            loss += float(
                functional.binary_cross_entropy_with_logits(
                    logits.double(), labels.double(), reduction="sum"
                )
            )
            if self._counter is not None:
                predictions.append((labels, predicted))
        if self._store is not None:
            self._store.close()
        if self._counter is not None and processes.is_main:  # the counter adds up all processes
            labels, predicted = (torch.cat(parts, 1) for parts in zip(*predictions, strict=True))
            self._counter.add(labels, predicted)
        defined = [value for value in precisions if value is not None]
        if not defined:
            raise DataError("expected labels to evaluate, but no image has any")
        micro, macro = f1_scores(torch.cat(counts, 1))
        return MultiLabelMetrics(
            images=images,
            loss=loss / (images * classes),
            map=100 * sum(defined) / len(defined),
            per_class_ap=tuple(None if value is None else 100 * value for value in precisions),
            f1_micro=100 * micro,
            f1_macro=100 * macro,
            threshold=tuple(thresholds) if self._find else self._threshold,
        )


def average_precision(scores: Tensor, targets: Tensor) -> float | None:
    """Return the average precision of a class, from 0 to 1, or None if no image has the class.

    `scores` and `targets` (0 or 1, or bool) are (N,). The result is the sum over all thresholds of
    precision times gain in recall. Equal scores share one threshold, as in scikit-learn.
    """
    if not bool(targets.any()):
        return None
    _, hits, ranks = _ranked_hits(scores, targets)
    gained = torch.diff(hits, prepend=hits.new_zeros(1)) / hits[-1]
    return min(1.0, float((gained * hits / ranks).sum()))  # rounding may give more than 1


def _ranked_hits(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct scores, falling, and the numbers of labels and images from each on."""
    order = scores.argsort(descending=True, stable=True)
    ranked, hits = scores[order], targets[order].double().cumsum(0)
    last_of_equals = torch.ones(len(ranked), dtype=torch.bool)
    last_of_equals[:-1] = ranked[1:] != ranked[:-1]
    ranks = torch.arange(1, len(ranked) + 1)
    return ranked[last_of_equals], hits[last_of_equals], ranks[last_of_equals]


def best_threshold(scores: Tensor, targets: Tensor, former: float) -> float:
    """Return the lowest threshold with the highest F1 of a class, or `former` without its images.

    `scores` are probabilities (N,). The result is a little below the score of an image, so that the
    rounding of another device or runtime does not move that image to the other side.
    """
    if not bool(targets.any()):
        return former
    ranked, hits, ranks = _ranked_hits(scores, targets)
    f1 = 2 * hits / (ranks + hits[-1])
    best = int((f1 == f1.max()).nonzero()[-1])
    score, below = (*ranked[best : best + 2].tolist(), 0.0)[:2]
    return score - min(_MARGIN, (score - below) / 2)


def label_counts(predicted: Tensor, labels: Tensor) -> Tensor:
    """Return numbers (3, C) of images with both, predicted and labelled; bool tensors (N, C)."""
    return torch.stack([x.sum(0).double() for x in (predicted & labels, predicted, labels)])


def f1_scores(counts: Tensor) -> tuple[float, float]:
    """Return micro F1, and macro F1 over classes that have images, from `label_counts` (3, C)."""
    both, predicted, labelled = counts
    either = predicted + labelled
    micro = 2 * both.sum() / either.sum().clamp(min=1)
    return float(micro), float((2 * both / either)[labelled > 0].mean())
