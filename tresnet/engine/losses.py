"""What the model is asked to get right, by timm's parts, and how well it does."""

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tresnet.data.seeding import mix_seed, preserved_generators, seed_cpu_generators
from tresnet.engine.config import TrainConfig
from tresnet.engine.distributed import Processes


class Losses:
    """The loss of each epoch, and the mixing of its batches."""

    def __init__(self, config: TrainConfig, classes: int, rank: int) -> None:
        """Build the losses that the configuration asks for.

        Args:
            config: The run's configuration.
            classes: Number of classes.
            rank: Each process mixes in its own way.
        """
        from timm.data.mixup import Mixup
        from timm.loss import SoftTargetCrossEntropy

        augment = config.augment
        self._mixing_epochs = config.schedule.epochs - augment.mix_off_epochs
        self._multi = config.labels.multi
        self._plain = plain_loss(config)
        self._soft = SoftTargetCrossEntropy()
        self._mixup = None
        if augment.mixes:
            self._mixup = Mixup(
                augment.mixup,
                augment.cutmix,
                prob=augment.mix_prob,
                label_smoothing=augment.label_smoothing,
                num_classes=classes,
            )
        self._seed = mix_seed(config.run.seed, rank)

    def mixes(self, epoch: int) -> bool:
        """Whether the batches of an epoch are mixed, so that they have no accuracy."""
        return self._mixup is not None and epoch < self._mixing_epochs

    def has_accuracy(self, epoch: int) -> bool:
        """Whether training batches have one right answer an image, to be right or wrong."""
        return not self._multi and not self.mixes(epoch)

    def prepare(
        self, images: Tensor, labels: Tensor, epoch: int, step: int
    ) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]:
        """Mix a batch if its epoch does.

        Args:
            images: (N, 3, H, W); overwritten by mixing.
            labels: (N,), or (N, classes) of 0 and 1 where an image may have several.
            epoch: From 0.
            step: Number of the batch in the whole run.

        Returns:
            Images, labels (N,) or label distributions (N, classes), and their loss.
        """
        if self._mixup is None or not self.mixes(epoch):
            return images, labels, self._plain
        with preserved_generators():  # so that a resumed run mixes the same way
            seed_cpu_generators(mix_seed(self._seed, step))
            images, soft = self._mixup(images, labels)
        return images, soft, self._soft


def plain_loss(config: TrainConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of batches that are not mixed."""
    from timm.loss import AsymmetricLossMultiLabel, LabelSmoothingCrossEntropy

    labels = config.labels
    if labels.loss == "bce":
        return nn.BCEWithLogitsLoss()
    if labels.loss == "asymmetric":
        return AsymmetricLossMultiLabel(labels.gamma_neg, labels.gamma_pos, labels.prob_margin)
    if config.augment.label_smoothing:
        return LabelSmoothingCrossEntropy(config.augment.label_smoothing)
    return nn.CrossEntropyLoss()


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
        self._batches: list[tuple[int, int, Tensor]] = []

    def add(self, update: int, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Take note of a batch.

        Args:
            update: Number of the update it is for, to report a bad loss.
            loss: Its mean loss ().
            logits: (N, classes).
            labels: (N,), or (N, classes) where an image may have several and none is the right one.
        """
        hits = loss.new_zeros(()) if labels.dim() > 1 else (logits.argmax(1) == labels).sum()
        self._batches.append((update, len(labels), torch.stack([loss.double(), hits.double()])))

    def drop(self, update: int) -> None:
        """Forget the batches of an update that was skipped."""
        self._batches = [batch for batch in self._batches if batch[0] != update]

    def look(self, processes: Processes) -> Look:
        """Sum up and begin anew (a collective)."""
        updates, images, values = zip(*self._batches, strict=True) if self._batches else ((),) * 3
        self._batches.clear()
        losses, hits = torch.stack(values).T.tolist() if values else ((), ())  # waits
        bad = [u for u, loss in zip(updates, losses, strict=True) if not math.isfinite(loss)]
        sums = [n * loss for n, loss in zip(images, losses, strict=True)]
        count, all_hits, *loss_sums = processes.sum(sum(images), sum(hits), *sums)
        (negative,) = processes.max(-min(bad) if bad else -math.inf)
        first_bad = None if negative == -math.inf else int(-negative)
        return Look(int(count), loss_sums, int(all_hits), first_bad)
