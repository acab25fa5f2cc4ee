"""Knowledge distillation: a run also learns from the logits of a teacher (arXiv 1503.02531)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tresnet.checkpoints.creation import create
from tresnet.checkpoints.describe import open_checkpoint
from tresnet.data.labels import class_map, match
from tresnet.engine.config import Resolved
from tresnet.errors import CheckpointError, ConfigError, TResNetError
from tresnet.models.tresnet import TResNet
from tresnet.peers import TIMM, open_pretrained
from tresnet.settings import InferenceCompute, sides
from tresnet.steps import InferenceStep
from tresnet.steps.outputs import finite


class Teacher:
    """Pretrained model in evaluation mode; the run's checkpoints do not contain it.

    `failed` says on the device whether any output so far was not finite.
    """

    def __init__(
        self, model: nn.Module, mapping: list[int] | None, config: Resolved, device: torch.device
    ) -> None:
        """Prepare inference; `mapping` has the indices of the logits to return, None means all."""
        self._mapping, self.failed = mapping, torch.zeros((), dtype=torch.bool, device=device)
        compute = InferenceCompute(
            amp=config.step.compute.amp,
            channels_last=config.step.compute.channels_last,
            fold=isinstance(model, TResNet),
            cuda_graph="off",
        )
        cfg: Any = model.pretrained_cfg
        self._step = InferenceStep(model, compute, device, normalised_by=cfg)

    def __call__(self, images: Tensor) -> Tensor:
        """Return float32 logits (N, classes) for images (N, 3, H, W) with values in [0, 1]."""
        logits = self._step(self._step.feed.images(images))
        logits = logits if self._mapping is None else logits[:, self._mapping]
        self.failed |= ~finite(logits).all()
        return logits


def create_teacher(
    config: Resolved, classes: Sequence[str], device: torch.device
) -> Teacher | None:
    """Return the teacher that `--teacher` names, if any; an unsuitable one raises ConfigError."""
    name = config.distill.teacher
    if name is None:
        return None
    if config.in_chans != 3:
        raise ConfigError(f"--teacher: expected images in RGB, got --in-chans {config.in_chans}")
    names = class_map(config.data.class_map)
    try:
        if name.startswith(TIMM):
            weights = open_pretrained(name, names)
            model = weights.model
        else:
            weights = open_checkpoint(name)
            weights.check_finite()
            names = weights.classes or weights.named(names).classes
            model = create(weights=weights)
    except CheckpointError as error:
        raise CheckpointError(f"--teacher: {error}") from error
    try:
        found = match(classes, names or weights.num_classes, "same")
    except ConfigError as error:
        raise ConfigError(f"--teacher {name}: {error}") from error
    teacher = Teacher(model, found.order, config, device)
    for height, width in map(sides, config.data.sizes):
        try:
            teacher(torch.zeros(1, 3, height, width, device=device))
        except (AssertionError, RuntimeError, TResNetError) as error:
            raise ConfigError(
                f"--teacher {name}: expected a model that takes images of {height} x {width}, as"
                f" the run has them, got {error}: use another teacher or --input-size"
            ) from error
    return teacher
