"""Several labels an image: average precision of each class, their mean, and F1 at a threshold."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tresnet.data import Loader
from tresnet.engine.config import LabelConfig
from tresnet.engine.console import Console
from tresnet.engine.distributed import Processes
from tresnet.engine.evaluate import Metrics, evaluate, run_over
from tresnet.errors import DataError
from tresnet.steps import InferenceStep


@dataclasses.dataclass(frozen=True)
class MultiLabelMetrics:
    """Over all images of all processes.

    Attributes:
        images: How many were read and classified.
        loss: Mean binary cross-entropy over images and classes.
        map: Mean of the classes' average precision in percent; classes nobody has are left out.
        per_class_ap: Average precision of each class in percent; None where no image has it.
        f1_micro: F1 in percent over all labels at once, at `threshold`.
        f1_macro: Mean of the classes' F1 in percent; 0 for a class neither had nor predicted.
        threshold: Probability from which a label counts as predicted.
        images_per_s: Summed over processes, loading included; None if it went too fast to tell.
        skipped: Unreadable files that were left out.
    """

    images: int
    loss: float
    map: float
    per_class_ap: tuple[float | None, ...]
    f1_micro: float
    f1_macro: float
    threshold: float
    images_per_s: float | None
    skipped: int

    @property
    def score(self) -> float:
        """What the best checkpoint is chosen by, in percent."""
        return self.map

    def figures(self) -> dict[str, float]:
        """The columns of the log."""
        return {"val_loss": self.loss, "val_map": self.map, "val_f1": self.f1_micro}

    def saved(self) -> dict[str, Any]:
        """What is kept beside the weights."""
        return {
            "labels": "multi",
            "map": self.map,
            "f1": self.f1_micro,
            "threshold": self.threshold,
            "loss": self.loss,
        }

    def summary(self) -> str:
        """One line for people."""
        return (
            f"mAP {self.map:.2f} %, F1 {self.f1_micro:.2f} % (macro {self.f1_macro:.2f} %) at"
            f" {self.threshold:g}, loss {self.loss:.4f}"
        )


def evaluate_multilabel(
    predict: Callable[[Tensor], Tensor],
    loader: Loader,
    processes: Processes,
    *,
    to_device: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    threshold: float = 0.5,
    class_map: Sequence[int] | None = None,
    console: Console | None = None,
) -> MultiLabelMetrics:
    """Run a model over a split whose images have any number of labels (a collective).

    Args:
        predict: From a batch as `to_device` gives it to logits (N, classes) in float32.
        loader: This process's share, in evaluation mode; labels (N, classes) of 0 and 1.
        processes: This process's place.
        to_device: Moves images and labels to the device.
        threshold: Probability from which a label counts as predicted.
        class_map: The model's class of each label; None where they are the same.
        console: Shows a bar; None for silence.

    Raises:
        DataError: No image could be read, or no image has any label.
    """
    batches: list[tuple[Tensor, Tensor]] = []

    def take(logits: Tensor, targets: Tensor) -> None:
        own = logits if class_map is None else logits[:, list(class_map)]
        batches.append((own.cpu(), targets.cpu()))

    ran = run_over(predict, loader, processes, to_device=to_device, take=take, console=console)
    shares = processes.gather(
        (torch.cat([a for a, _ in batches]).numpy(), torch.cat([b for _, b in batches]).numpy())
        if batches
        else None
    )
    logits, targets = (
        torch.cat([torch.from_numpy(share[part]) for share in shares if share is not None])
        for part in (0, 1)
    )
    precisions = [
        average_precision(logits[:, index], targets[:, index]) for index in range(targets.shape[1])
    ]
    known = [value for value in precisions if value is not None]
    if not known:
        raise DataError("expected labels to evaluate, but no image has any")
    micro, macro = f1_scores(logits.sigmoid() >= threshold, targets > 0.5)
    return MultiLabelMetrics(
        images=len(targets),
        loss=float(functional.binary_cross_entropy_with_logits(logits, targets)),
        map=100 * sum(known) / len(known),
        per_class_ap=tuple(None if value is None else 100 * value for value in precisions),
        f1_micro=100 * micro,
        f1_macro=100 * macro,
        threshold=threshold,
        images_per_s=ran.images_per_s,
        skipped=ran.skipped,
    )


def evaluate_labels(
    labels: LabelConfig,
    step: InferenceStep,
    loader: Loader,
    processes: Processes,
    *,
    class_map: list[int] | None = None,
    console: Console | None = None,
) -> Metrics | MultiLabelMetrics:
    """Evaluate with one label an image, or with several, as configured (a collective).

    Raises:
        DataError: No image could be read.
    """
    shared: Any = {
        "to_device": step.feed,
        "class_map": class_map,
        "console": console,
    }
    if labels.multi:
        shared["threshold"] = labels.threshold
        return evaluate_multilabel(step, loader, processes, **shared)
    return evaluate(step, loader, processes, **shared)


def average_precision(scores: Tensor, targets: Tensor) -> float | None:
    """Sum over the thresholds of precision times the recall gained there.

    Images of equal score pass a threshold together, as in scikit-learn.

    Args:
        scores: (N,), higher for likelier.
        targets: (N,), 0 or 1.

    Returns:
        A share from 0 to 1; None if no image has the label.
    """
    if not bool(targets.any()):
        return None
    order = scores.argsort(descending=True, stable=True)
    ranked, hits = scores[order], targets[order].double().cumsum(0)
    last_of_equals = torch.ones(len(ranked), dtype=torch.bool)
    last_of_equals[:-1] = ranked[1:] != ranked[:-1]
    hits, passed = hits[last_of_equals], torch.arange(1, len(ranked) + 1)[last_of_equals]
    gained = torch.diff(hits, prepend=hits.new_zeros(1)) / hits[-1]
    return min(1.0, float((gained * hits / passed).sum()))  # the last bit may round up


def f1_scores(predicted: Tensor, targets: Tensor) -> tuple[float, float]:
    """F1 over all labels at once, and the mean of the classes' own; 0 where nothing is there.

    Args:
        predicted: (N, C), booleans.
        targets: (N, C), booleans.
    """
    both = (predicted & targets).sum(0).double()
    either = predicted.sum(0).double() + targets.sum(0).double()
    micro = 2 * both.sum() / either.sum().clamp(min=1)
    return float(micro), float((2 * both / either.clamp(min=1)).mean())
