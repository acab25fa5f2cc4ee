"""Loss functions, mixing of batches, and the meter of the training loss."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tresnet.data.dataset import ImageDataset
from tresnet.data.labels import composed
from tresnet.data.seeding import mix_seed, preserved_generators, seed_cpu_generators
from tresnet.engine.config import BALANCED, Filled, Resolved
from tresnet.engine.distill import Teacher, create_teacher
from tresnet.engine.distributed import Processes
from tresnet.engine.erasing import erasings
from tresnet.errors import ConfigError, listed

Loss = Callable[[Tensor, Tensor], Tensor]

_MAX_WEIGHT = 20.0  # largest weight of a hierarchy level, from the code of arXiv 2104.10972


class Losses:
    """Cutout, random erasing, mixup, targets and loss function of a run's batches."""

    def __init__(
        self,
        config: Filled,
        classes: Sequence[str],
        rank: int,
        teacher: Teacher | None = None,
        weights: Tensor | None = None,  # the result of `class_weights`, on the step's device
    ) -> None:
        from timm.data.mixup import Mixup

        augment = config.augment
        self._mixing_epochs = config.schedule.epochs - augment.mix_off_epochs
        self._multi = config.labels.multi
        self._hard, self._soft = (
            loss_of(config, classes, mixed, weights) for mixed in (False, True)
        )
        both = (self._hard, self._soft)
        self._weighted = [each for each in both if isinstance(each, WeightedCrossEntropy)]
        # copied once: a copy in each step would wait for the device
        self._class_weights = self._weighted[0].weights.cpu().double() if self._weighted else None
        self.levels: Tensor | None = getattr(self._hard, "levels", None)  # None if no hierarchy
        self.teacher = teacher
        self._distilled = DistillationLoss(
            self._soft, config.distill.kd_weight, config.distill.kd_temperature
        )
        self._classes, self._smoothing = len(classes), augment.label_smoothing
        self._erasings = erasings(augment)
        self._mixup = None
        if augment.mixes:
            self._mixup = Mixup(
                augment.mixup,
                augment.cutmix,
                prob=augment.mix_prob,
                label_smoothing=augment.label_smoothing,
                num_classes=len(classes),
            )
        self._seed = mix_seed(config.run.seed, rank)  # each rank mixes differently

    def mixes(self, epoch: int) -> bool:
        """Return whether the batches of `epoch`, which counts from 0, are mixed."""
        return self._mixup is not None and epoch < self._mixing_epochs

    def has_accuracy(self, epoch: int) -> bool:
        """Return whether accuracy is defined: one label per image, no mixing and no hierarchy."""
        return not self._multi and not self.mixes(epoch) and self.levels is None

    def weight_of(self, labels: Iterable[Tensor]) -> float | None:
        """Return the sum of the images' weights, or None if the loss has no weights of images.

        `labels` are those of a step's micro-batches, each (N,) on the CPU.
        """
        weights = self._class_weights
        if weights is None:
            return None
        return sum(float(weights[each].sum()) for each in labels)

    def begin_step(self, weight: float, micro_batches: int) -> None:
        """Begin an optimizer step; `weight` is the sum of its images' weights, of all processes.

        `micro_batches` is the number of its micro-batches on all processes.
        """
        for each in self._weighted:
            each.per_micro_batch.fill_(weight / micro_batches)

    def prepare(
        self, images: Tensor, labels: Tensor, epoch: int, step: int
    ) -> tuple[Tensor, Tensor, Loss]:
        """Erase and mix a batch as configured; return images, targets and the loss function.

        Mixing overwrites `images` (N, 3, H, W). With a teacher, `images` must be floats. `labels`
        are class indices (N,), or zeros and ones (N, classes). The targets are `labels`, or
        distributions (N, classes) if the batch is mixed. With a teacher, the targets (N, 2,
        classes) hold a distribution and the teacher's logits for each image. `step` is the index of
        the micro-batch in the run, and seeds erasing and mixing.
        """
        for index, erasing in enumerate(self._erasings):
            images = erasing(images, mix_seed(self._seed, step, index))
        targets, criterion = labels, self._hard
        if self._mixup is not None and self.mixes(epoch):
            with preserved_generators():  # the seed below must not change other random numbers
                seed_cpu_generators(mix_seed(self._seed, step))
                images, targets = self._mixup(images, labels)
            criterion = self._soft
        if self.teacher is None:
            return images, targets, criterion
        if targets.dim() == 1:
            from timm.data.mixup import one_hot

            off = self._smoothing / self._classes
            targets = one_hot(targets, self._classes, 1 - self._smoothing + off, off)
        return images, torch.stack([targets, self.teacher(images)], 1), self._distilled


def create_losses(config: Resolved, dataset: ImageDataset, processes: Processes) -> Losses:
    """Return this process's losses; `dataset` is the training split."""
    device, classes = processes.device, dataset.classes
    teacher = create_teacher(config, classes, device)
    weights = class_weights(config, dataset)
    weights = None if weights is None else weights.to(device)
    return Losses(config, classes, processes.rank, teacher, weights)


def loss_of(
    config: Filled, classes: Sequence[str], mixed: bool, weights: Tensor | None = None
) -> Loss:
    """Return the loss function; targets are distributions (N, C) if `mixed`, otherwise labels.

    `weights` (C,) is the result of `class_weights`.
    """
    from timm.loss import BinaryCrossEntropy

    labels, smoothing = config.labels, config.augment.label_smoothing
    if labels.loss == "one-vs-all":
        return BinaryCrossEntropy(smoothing, labels.bce_target_thresh)
    if mixed:
        return nn.CrossEntropyLoss() if weights is None else WeightedCrossEntropy(weights)
    if labels.loss == "semantic-softmax":
        assert labels.hierarchy is not None, "checked by validate"
        return SemanticSoftmaxLoss(read_hierarchy(labels.hierarchy, classes), smoothing)
    if labels.loss == "bce":
        return nn.BCEWithLogitsLoss(pos_weight=weights)
    if labels.loss == "asymmetric":
        return AsymmetricLoss(labels.gamma_neg, labels.gamma_pos, labels.prob_margin, weights)
    if weights is not None:
        return WeightedCrossEntropy(weights, smoothing)
    return nn.CrossEntropyLoss(label_smoothing=smoothing)


class WeightedCrossEntropy(nn.Module):
    """Cross-entropy with a weight for each class, averaged by the weights of an optimizer step.

    The sum of weight times loss is divided by `per_micro_batch`: the sum of the weights of the
    step's images on all processes, divided by the number of its micro-batches. PyTorch's mean
    divides by the weights of one micro-batch, so micro-batches with frequent classes count more.
    """

    def __init__(self, weights: Tensor, smoothing: float = 0.0) -> None:
        super().__init__()
        self.weights, self._smoothing = weights, smoothing
        self.per_micro_batch = weights.new_ones(())  # filled in place: a CUDA graph reads it

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the scalar loss; targets are labels (N,) or distributions (N, classes)."""
        total = functional.cross_entropy(
            logits, targets, self.weights, reduction="sum", label_smoothing=self._smoothing
        )
        return total / self.per_micro_batch


def class_weights(config: Resolved, dataset: ImageDataset) -> Tensor | None:
    """Return the weight of each class (C,) by --class-weights, or None without this option.

    `dataset` is the training split. ConfigError: the file has other classes than the data, or is
    damaged; or a class has no image, or every image, so that its balanced weight is not finite.
    """
    source = config.labels.class_weights
    if source is None:
        return None
    classes, images = dataset.classes, len(dataset)
    if source != BALANCED:
        return _read_class_weights(source, classes)
    counts = torch.from_numpy(dataset.labels.counts).double()
    weights = (images - counts if dataset.multi else images / len(classes)) / counts
    bad = [name for name, w in zip(classes, weights.tolist(), strict=True) if not 0 < w < math.inf]
    if bad:
        what = "with and without each label" if dataset.multi else "of each class"
        raise ConfigError(
            f"--class-weights {BALANCED}: expected images {what} in {dataset.split}, got none for"
            f" {listed(bad, 5)}: give the weights in a file"
        )
    return weights.float()


def _read_class_weights(path: str, classes: Sequence[str]) -> Tensor:
    weights = _read_json("--class-weights", path)
    if not isinstance(weights, dict) or weights.keys() != set(classes):
        got = sorted(weights) if isinstance(weights, dict) else [type(weights).__name__]
        raise ConfigError(
            f"--class-weights: expected a JSON object with a weight for each of the data's classes"
            f" ({listed(classes, 5)}) in {path}, got {listed(got, 5)}"
        )
    for name, weight in weights.items():
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        # the mean loss of a batch in which all weights are 0 would be 0 / 0
        if not number or not 0 < weight < math.inf:
            raise ConfigError(
                f"--class-weights: expected a finite number above 0 for each class in {path}, got"
                f" {weight!r:.80} for {name}"
            )
    return torch.tensor([float(weights[name]) for name in classes])


def _read_json(option: str, path: str) -> Any:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        # Names have the form of Unicode that the data set's classes have.
        return json.loads(composed(json.dumps(content, ensure_ascii=False)))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{option}: no readable JSON in {path}: {error}") from error


class AsymmetricLoss(nn.Module):
    """Asymmetric loss of images with any number of labels (arXiv 2009.14119).

    With the probability p of a label, the loss is -(1 - p)^gamma_pos log p if the image has the
    label. Otherwise it is -q^gamma_neg log(1 - q), where q = max(p - prob_margin, 0). timm's
    `AsymmetricLossMultiLabel` replaces probabilities below 1e-8 by 1e-8, so that the gradient of
    such a label is 0. Here logarithms come from the logits, and no probability is too small.
    """

    def __init__(
        self,
        gamma_neg: float,
        gamma_pos: float,
        prob_margin: float,
        pos_weight: Tensor | None = None,  # (C,) weights of the positive labels' losses
    ) -> None:
        super().__init__()
        self._pos_weight = pos_weight
        self._gamma_neg = gamma_neg
        self._gamma_pos = gamma_pos
        self._log_margin = math.log(prob_margin) if prob_margin else -math.inf

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the scalar sum over classes and mean over images; targets (N, C) are 0 or 1."""
        logits = logits.float()
        margin = logits.new_full((), self._log_margin)
        log_p = functional.logsigmoid(logits)
        log_not_q = torch.logaddexp(functional.logsigmoid(-logits), margin).clamp(max=0)
        positive = _focal(log_p, self._gamma_pos)
        if self._pos_weight is not None:
            positive = positive * self._pos_weight
        negative = _focal(log_not_q, self._gamma_neg)
        return torch.where(targets > 0.5, positive, negative).sum() / len(logits)


def _focal(log_p: Tensor, gamma: float) -> Tensor:
    """Return -(1 - p)^gamma log p for log p."""
    # At 1 - p = 0 the derivative of a power below 1 is infinite, and infinity times 0 is NaN.
    complement = (-torch.expm1(log_p)).clamp(min=torch.finfo(log_p.dtype).tiny)
    return -(complement**gamma) * log_p


class DistillationLoss(nn.Module):
    """Loss of the labels plus `weight` times T^2 KL(teacher || model) at temperature T."""

    def __init__(self, labels: Loss, weight: float, temperature: float) -> None:
        super().__init__()
        self._labels = labels
        self._weight = weight
        self._temperature = temperature

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the scalar loss; targets (N, 2, C) hold distributions and the teacher's logits."""
        labels, teacher = targets.unbind(1)
        t = self._temperature
        divergence = functional.kl_div(
            functional.log_softmax(logits / t, 1),
            functional.log_softmax(teacher / t, 1),
            reduction="batchmean",
            log_target=True,
        )
        return self._labels(logits, labels) + self._weight * t**2 * divergence


def read_hierarchy(path: str, classes: Sequence[str]) -> list[list[int]]:
    """Return for each class its label, then its ancestors' labels in `classes`, parent first."""
    parents = _read_json("--hierarchy", path)
    if not isinstance(parents, dict) or not all(isinstance(v, str) for v in parents.values()):
        raise ConfigError(
            f"--hierarchy: expected a JSON object from names to their parents' names in {path}"
        )
    lineages = [_lineage(name, parents, path) for name in classes]
    labels = {name: label for label, name in enumerate(classes)}
    ancestors = [[labels[name] for name in lineage if name in labels] for lineage in lineages]
    if all(len(lineage) == 1 for lineage in ancestors):
        raise ConfigError(
            f"--hierarchy: expected the data's classes ({', '.join(classes[:3])}, ...) in {path},"
            " got no class with a parent among them: use the names of the class folders"
        )
    return ancestors


def _lineage(name: str, parents: Mapping[str, str], path: str) -> list[str]:
    lineage = [name]
    while (parent := parents.get(lineage[-1])) is not None:
        if parent in lineage:
            raise ConfigError(f"--hierarchy: {parent!r} is its own ancestor in {path}")
        lineage.append(parent)
    return lineage


class SemanticSoftmaxLoss(nn.Module):
    """Weighted sum of cross-entropies, one for each level of a hierarchy of classes.

    A class's level is the number of its ancestors. An image counts on every level from 0 to that of
    its class, with the class or ancestor there as label. Deep levels get fewer images. So a level's
    weight is C / (number of the C classes on this level or deeper), but at most 20. Logits of
    different levels cannot be compared, so `evaluate` needs the level of each class, `levels` (C,).
    """

    def __init__(self, ancestors: list[list[int]], smoothing: float) -> None:
        """Group the classes by level; `ancestors` is the result of `read_hierarchy`."""
        super().__init__()
        self._smoothing = smoothing
        self.levels = depths = torch.tensor([len(path) - 1 for path in ancestors])
        self._levels: list[tuple[Tensor, Tensor, float]] = []
        for level in range(int(depths.max()) + 1):
            members = torch.nonzero(depths == level).flatten()
            if len(members) < 2:  # the loss of a single class is 0
                continue
            index = {label: i for i, label in enumerate(members.tolist())}
            targets = [index[path[-1 - level]] if len(path) > level else -1 for path in ancestors]
            weight = len(ancestors) / int((depths >= level).sum())
            self._levels.append((members, torch.tensor(targets), min(weight, _MAX_WEIGHT)))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the scalar mean loss over the images; logits are (N, C), labels are (N,)."""
        total = logits.new_zeros(())
        if self.levels.device != logits.device:
            self.levels = self.levels.to(logits.device)
            self._levels = [
                (m.to(logits.device), t.to(logits.device), w) for m, t, w in self._levels
            ]
        for members, targets, weight in self._levels:
            loss = functional.cross_entropy(
                logits[:, members],
                targets[labels],
                ignore_index=-1,
                reduction="sum",
                label_smoothing=self._smoothing,
            )
            total = total + weight * loss / len(labels)
        return total


class LossMeter:
    """Collector of losses that stay on the device; only `read` waits for the device."""

    def __init__(self) -> None:
        self._batches: list[tuple[int, int, Tensor]] = []

    def add(self, global_step: int, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a micro-batch: scalar mean loss, logits (N, classes), labels (N,) or (N, classes)."""
        hits = loss.new_zeros(()) if labels.dim() > 1 else (logits.argmax(1) == labels).sum()
        self._batches.append(
            (global_step, len(labels), torch.stack([loss.double(), hits.double()]))
        )

    def drop(self, global_step: int) -> None:
        """Remove a skipped optimizer step's micro-batches from those that `read` will sum."""
        self._batches = [batch for batch in self._batches if batch[0] != global_step]

    def read(self, processes: Processes) -> tuple[int, list[float], int, int | None]:
        """Return sums over all processes since the last `read` (a collective).

        They are: number of images, each micro-batch's sum of its images' losses, number of images
        classified correctly, and the first optimizer step whose loss is not finite, or None.
        """
        steps, images, values = zip(*self._batches, strict=True) if self._batches else ((),) * 3
        self._batches.clear()
        losses, hits = torch.stack(values).T.tolist() if values else ((), ())  # waits for the GPU
        bad = [n for n, loss in zip(steps, losses, strict=True) if not math.isfinite(loss)]
        sums = [n * loss for n, loss in zip(images, losses, strict=True)]
        count, all_hits, *loss_sums = processes.sum(sum(images), sum(hits), *sums)
        # `Processes` has no `min`: the minimum is minus the maximum of the negative values.
        (negative,) = processes.max(-min(bad) if bad else -math.inf)
        first_bad = None if negative == -math.inf else int(-negative)
        return int(count), loss_sums, int(all_hits), first_bad
