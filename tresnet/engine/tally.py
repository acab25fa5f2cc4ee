"""Losses and hits of recent batches, left on the device until somebody looks."""

import dataclasses
import math

import torch
from torch import Tensor

from tresnet.engine.distributed import Processes


@dataclasses.dataclass(frozen=True)
class Look:
    """Sums over the batches since the last look, of all processes.

    Attributes:
        images: How many.
        loss_sums: Of each batch, the sum over its images.
        hits: How many were classified correctly.
        first_bad: The first update whose loss is nan or infinite, or None.
    """

    images: int
    loss_sums: list[float]
    hits: int
    first_bad: int | None


class Tally:
    """Collects without waiting for the device; looking waits once."""

    def __init__(self) -> None:
        self._updates: list[int] = []
        self._images: list[int] = []
        self._values: list[Tensor] = []

    def add(self, update: int, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Take note of a batch.

        Args:
            update: Number of the update it is for, to report a bad loss.
            loss: Its mean loss ().
            logits: (N, classes).
            labels: (N,), or (N, classes) where an image may have several and none is the right one.
        """
        hits = loss.new_zeros(()) if labels.dim() > 1 else (logits.argmax(1) == labels).sum()
        self._updates.append(update)
        self._images.append(len(labels))
        self._values.append(torch.stack([loss.double(), hits.double()]))

    def look(self, processes: Processes) -> Look:
        """Sum up and begin anew (a collective)."""
        values = torch.stack(self._values).tolist() if self._values else []
        losses = [loss for loss, _ in values]
        bad = [u for u, x in zip(self._updates, losses, strict=True) if not math.isfinite(x)]
        images, hits, *loss_sums = processes.sum(
            sum(self._images),
            sum(hits for _, hits in values),
            *(n * x for n, x in zip(self._images, losses, strict=True)),
        )
        (negative,) = processes.max(-min(bad) if bad else -math.inf)
        self._updates.clear()
        self._images.clear()
        self._values.clear()
        first_bad = None if negative == -math.inf else int(-negative)
        return Look(int(images), loss_sums, int(hits), first_bad)
