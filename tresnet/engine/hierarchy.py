"""Semantic softmax: a loss on each level of a hierarchy of classes (arXiv 2104.10972)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from tresnet.errors import ConfigError

# Largest weight of a level, from the authors' code.
_MOST_WEIGHT = 20.0


def read_hierarchy(path: str, classes: Sequence[str]) -> list[list[int]]:
    """Return for each class the labels [itself, parent, grandparent, ...], or raise ConfigError.

    The file is a JSON object from names to their parents' names. `classes` are in the order of the
    labels. Names that are not classes are skipped, but not their parents.
    """
    try:
        parents = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--hierarchy: no readable JSON in {path}: {error}") from error
    if not isinstance(parents, dict) or not all(isinstance(v, str) for v in parents.values()):
        raise ConfigError(
            f"--hierarchy: expected a JSON object from names to their parents' names in {path}"
        )
    lines = [_line(name, parents, path) for name in classes]
    labels = {name: label for label, name in enumerate(classes)}
    found = [[labels[name] for name in line if name in labels] for line in lines]
    if all(len(line) == 1 for line in found):
        raise ConfigError(
            f"--hierarchy: expected the data's classes ({', '.join(classes[:3])}, ...) in {path},"
            " got none with another above it: give their names as the folders have them"
        )
    return found


def _line(name: str, parents: Mapping[str, str], path: str) -> list[str]:
    line = [name]
    while (above := parents.get(line[-1])) is not None:
        if above in line:
            raise ConfigError(f"--hierarchy: {above!r} is above itself in {path}")
        line.append(above)
    return line


class SemanticSoftmaxLoss(nn.Module):
    """Weighted sum over levels of a cross-entropy among the classes of that level.

    A class's level is its number of ancestors. An image counts on its class's level and, with the
    ancestor as label, on each level above. Deep levels get fewer images, so a level weighs C / (the
    number of classes at or below it), at most 20. `levels` (C,) has the level of each class.
    Logits of different levels cannot be compared.
    """

    def __init__(self, ancestors: list[list[int]], smoothing: float) -> None:
        """Group the classes by level; `ancestors` are those of `read_hierarchy`."""
        super().__init__()
        self._smoothing = smoothing
        self.levels = depths = torch.tensor([len(line) - 1 for line in ancestors])
        self._levels: list[tuple[Tensor, Tensor, float]] = []
        for level in range(int(depths.max()) + 1):
            members = torch.nonzero(depths == level).flatten()
            if len(members) < 2:  # a single class has no loss
                continue
            place = {label: i for i, label in enumerate(members.tolist())}
            targets = [place[line[-1 - level]] if len(line) > level else -1 for line in ancestors]
            weight = len(ancestors) / int((depths >= level).sum())
            self._levels.append((members, torch.tensor(targets), min(weight, _MOST_WEIGHT)))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss (), a mean over images, of logits (N, C) and labels (N,)."""
        total = logits.new_zeros(())
        self._levels = [(m.to(logits.device), t.to(logits.device), w) for m, t, w in self._levels]
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
