"""Knowledge distillation: a run also learns from the logits of a teacher (arXiv 1503.02531)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tresnet.checkpoints.creation import create
from tresnet.checkpoints.describe import open_checkpoint
from tresnet.data.labels import Outputs, class_map, match
from tresnet.engine.resolve import Resolved
from tresnet.errors import CheckpointError, ConfigError, TResNetError
from tresnet.models.tresnet import TResNet
from tresnet.peers import check_name
from tresnet.settings import InferenceCompute, sides
from tresnet.steps import InferenceStep

_TIMM = "timm:"


class Teacher:
    """Pretrained model in evaluation mode; the run's checkpoints do not contain it."""

    def __init__(
        self, model: nn.Module, mapping: list[int] | None, config: Resolved, device: torch.device
    ) -> None:
        """Prepare inference; `mapping` has the indices of the logits to return, None means all."""
        cfg = getattr(model, "pretrained_cfg", None) or {}
        mean, std = cfg.get("mean") or (0.0,), cfg.get("std") or (1.0,)
        self._mean, self._std = (torch.tensor(v, device=device).view(-1, 1, 1) for v in (mean, std))
        self._normalises = bool(self._mean.any() or (self._std != 1).any())
        self._mapping = mapping
        compute = InferenceCompute(
            amp=config.step.compute.amp,
            channels_last=config.step.compute.channels_last,
            fold=isinstance(model, TResNet),
            cuda_graph="off",
        )
        self._step = InferenceStep(model, compute, device)

    def __call__(self, images: Tensor) -> Tensor:
        """Return float32 logits (N, classes) for images (N, 3, H, W) with values in [0, 1]."""
        if self._normalises:
            images = (images - self._mean) / self._std
        logits = self._step(images)
        return logits if self._mapping is None else logits[:, self._mapping]


def create_teacher(
    config: Resolved, classes: Sequence[str], device: torch.device
) -> Teacher | None:
    """Return the teacher that `--teacher` names, if any; an unsuitable one raises ConfigError."""
    name = config.distill.teacher
    if name is None:
        return None
    if name.startswith(_TIMM):
        model = _from_timm(name)
        names, count = None, model.num_classes
    else:
        weights = open_checkpoint(name)
        weights.check_finite()
        model = create(weights=weights)
        names, count = weights.classes, weights.num_classes
    try:
        found = match(classes, Outputs(count, names or class_map(config.data.class_map)), "same")
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


def _from_timm(name: str) -> Any:
    import timm

    check_name(name)
    try:
        return timm.create_model(name.removeprefix(_TIMM), pretrained=True)
    except Exception as error:  # the download or timm may raise an error of any type
        raise CheckpointError(
            f"--teacher {name}: timm cannot give its pretrained weights"
            f" ({type(error).__name__}: {error})"
        ) from error
