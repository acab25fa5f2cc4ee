"""Open published weights or a file of weights, and describe the model that fits the weights."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from tresnet.checkpoints.metadata import read_config
from tresnet.checkpoints.published import WeightsEntry, class_names, entries, locate
from tresnet.checkpoints.remap import Weights, identify, read_weights, unknown_of_body
from tresnet.errors import CheckpointError, InputError, listed
from tresnet.models.zoo import VARIANTS, default_pretrained_cfg, make_config
from tresnet.settings.model import LayerBuild, ModelConfig

_log = logging.getLogger(__name__)
# Tensors that have a head's sizes: the first that there is determines them.
_SIZES = {
    "bottleneck": ("fc.0.weight", "fc.0.bias"),
    "group_attention": ("reduce.conv.weight", "reduce.bn.weight"),
    "ml_decoder": ("fc.query_embed.weight", "fc.duplicate_pooling"),
}


@dataclass(frozen=True)
class WeightsInfo:
    """Weights, and the description of the model that `create` builds.

    For ImageNet, `classes` are WordNet ids (n01440764), and `descriptions` are names (tench).
    """

    name: str  # tag or path, as requested
    config: ModelConfig  # with the default norm; the variant is a guess if `guessed`
    classes: tuple[str, ...] | None  # names of the classes, if known
    descriptions: tuple[str, ...] | None
    pretrained_cfg: dict[str, Any]  # timm's dict on resizing, cropping and origin
    user: dict[str, Any]  # metadata that the caller of `save_checkpoint` stored
    guessed: bool  # whether no variant has layers and widths like the weights
    entry: WeightsEntry | None  # manifest entry of a tag; None for a path or an hf-hub name
    weights: Weights = field(repr=False, compare=False)

    @property
    def num_classes(self) -> int:
        return self.config.num_classes

    def named(self, classes: Sequence[str] | None) -> Self:
        """Return a copy whose outputs have the names `classes`; None returns the same object.

        CheckpointError: the number of names is wrong, or the weights state another order of them.
        """
        if classes is None:
            return self
        if len(classes) != self.num_classes:
            raise CheckpointError(
                f"expected the names of the {self.num_classes} classes of {self.name}, got "
                f"{len(classes)}: check --class-map"
            )
        if self.classes not in (None, tuple(classes)) and sorted(self.classes) == sorted(classes):
            raise CheckpointError(
                f"{self.name} states the order {listed(self.classes, 5)} of its classes, got "
                f"{listed(classes, 5)}: leave --class-map out"
            )
        user = {key: value for key, value in self.user.items() if key != "descriptions"}
        return replace(self, classes=tuple(classes), descriptions=None, user=user)

    @property
    def metadata(self) -> dict[str, Any]:
        """Return the metadata with which to save the weights again, with all names of classes."""
        named = {"classes": self.classes, "descriptions": self.descriptions}
        return self.user | {key: list(names) for key, names in named.items() if names is not None}

    def check_finite(self) -> None:
        """Raise CheckpointError for infinities and NaN, which result from a diverged training."""
        bad = [key for key, t in self.weights.tensors.items() if not bool(t.isfinite().all())]
        if bad:
            raise CheckpointError(
                f"{self.name} holds infinities or NaN, in {listed(bad, 3)}: the training "
                "diverged; take an earlier checkpoint"
            )


def open_weights(name: str | os.PathLike[str] | WeightsInfo) -> WeightsInfo:
    """Read the weights of a file, directory, `hf-hub:USER/NAME` or tag; download them if needed.

    Directories (also `local-dir:DIR`) and hub repositories need timm's layout. Unless the file of
    weights has metadata, config.json gives options, image settings and class names.

    Raises:
        InputError: the tag is unknown.
        CheckpointError: the file cannot be found or read, or is not of a TResNet.
    """
    if isinstance(name, WeightsInfo):
        return name
    path, config_json, entry = locate(name)
    return _describe(os.fsdecode(name), read_weights(path), config_json, entry)


def _describe(
    name: str, weights: Weights, config_json: Path | None, entry: WeightsEntry | None
) -> WeightsInfo:
    metadata, config, guessed = weights.metadata, weights.config, False
    if config is None:
        config, guessed = _config_of_tensors(weights)
        if config.head == "group_attention" and config_json is None:
            text = "%s does not state the number of classes in each group of the head: equal groups"
            _log.warning(f"{text} are assumed; give other sizes by head_groups", name)
    # The training run's drop rates and norm are ignored; drop rates in config.json are read next.
    config = replace(config, drop_rate=0.0, drop_path_rate=0.0)
    if config_json is not None and not metadata:
        config, metadata = read_config(config_json, config)
    config = replace(config, **vars(LayerBuild()), **weights.slopes)
    user = weights.user | metadata.get("user", {})
    classes, descriptions = user.get("classes"), user.get("descriptions")
    published = entry or entries().get(str(metadata.get("tag")))
    if classes is None and published and published.num_classes == config.num_classes:
        classes, descriptions = class_names(published)
    return WeightsInfo(
        name=name,
        config=config,
        classes=None if classes is None else tuple(classes),
        descriptions=None if descriptions is None else tuple(descriptions),
        pretrained_cfg=_pretrained_cfg(name, config, metadata.get("pretrained_cfg", {}), entry),
        user=user,
        guessed=guessed,
        entry=entry,
        weights=weights,
    )


def _pretrained_cfg(
    name: str, config: ModelConfig, stated: Mapping[str, Any], entry: WeightsEntry | None
) -> dict[str, Any]:
    """Return the variant's `pretrained_cfg`, updated by `stated` and by `entry.pretrained_cfg`."""
    cfg: dict[str, Any] = default_pretrained_cfg(config.variant, config)
    cfg |= {key: value for key, value in stated.items() if value is not None}
    cfg |= {} if entry is None else entry.pretrained_cfg
    cfg = {key: tuple(v) if isinstance(v, list) else v for key, v in cfg.items()}
    if any(cfg["mean"]) or any(value != 1 for value in cfg["std"]):
        raise CheckpointError(
            f"expected mean 0 and std 1, got {name} for images normalised by mean {cfg['mean']} "
            f"and std {cfg['std']}, while this package feeds images in [0, 1] as they are: "
            "fine-tune them on such images, or normalise yourself and load the file of weights by "
            "tresnet.load_checkpoint(model, FILE)"
        )
    side = 8 * config.block_size
    return cfg | {"pool_size": tuple(size // side for size in cfg["input_size"][1:])}


def _config_of_tensors(weights: Weights) -> tuple[ModelConfig, bool]:
    stored = identify(weights.tensors)
    variant = stored.variant or ("tresnet_v2_l" if stored.bottlenecks else "tresnet_m")
    usual = VARIANTS[variant]
    if min(*stored.layers, stored.planes, stored.stem_channels) < 1:
        raise CheckpointError(
            f"{weights.path} holds only a part of a TResNet (stages "
            f"{'-'.join(map(str, stored.layers))}): expected body.conv1.conv.weight and "
            "four stages; save the state dict of the complete model"
            f"{unknown_of_body(weights)}"
        )
    inputs = stored.stem_channels
    block_size = next(b for b in (usual.block_size, 2, 1) if inputs % b**2 == 0 and inputs >= b**2)
    try:
        config = make_config(
            variant,
            layers=stored.layers,
            width_factor=usual.width_factor if stored.variant else stored.planes / 64,
            block_size=block_size,
            in_chans=inputs // block_size**2,
            num_classes=stored.num_classes,
            **_head(stored.head, stored.num_classes, weights.tensors),
        )
    except (InputError, LookupError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{weights.path} is not a usable TResNet: {error}") from error
    return config, stored.variant is None


def _head(kind: str, classes: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the options of a head; one missing tensor of it is no obstacle, and `fit` names it."""
    if kind == "linear":
        return {}
    own = [tensors[f"head.{name}"].shape for name in _SIZES[kind] if f"head.{name}" in tensors]
    options: dict[str, Any] = {"head": kind, "head_channels": own[0][0]}
    if kind == "ml_decoder":
        queries, options["head_channels"] = own[0][:2]
        options["head_queries"] = None if queries == min(100, classes) else queries
    if kind == "group_attention":
        branches = tensors.get("head.attention.conv3.bn.weight", torch.empty(own[0][0]))
        options["head_groups"] = len(branches) // own[0][0]
    return options
