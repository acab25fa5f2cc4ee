"""Open published weights or a file of weights, with a description of their model.

All commands find and read weights by `open_weights`. The description comes from the file's
metadata, from config.json and from the table of published weights.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from tresnet.checkpoints.download import HUB, fetch, from_hub_layout, from_layout
from tresnet.checkpoints.metadata import read_config
from tresnet.checkpoints.published import WeightsEntry, class_names, entries, locate
from tresnet.checkpoints.remap import Architecture, Weights, identify, read_weights
from tresnet.errors import CheckpointError, InputError, listed
from tresnet.models.config import ModelConfig
from tresnet.models.zoo import VARIANTS, default_pretrained_cfg, make_config

_log = logging.getLogger(__name__)
_LOCAL = "local-dir:"  # prefix of a directory's path, as in timm
# Fields of `ModelConfig`, besides num_classes, that `WeightsInfo.kwargs` always has.
_ARCHITECTURE = ("layers", "width_factor", "block_size", "in_chans", "global_pool")
_HEAD = ("head", "head_groups", "head_channels")
_DROPS = ("drop_rate", "drop_path_rate")  # `kwargs` has these if config.json is used


@dataclass(frozen=True)
class WeightsInfo:
    """Weights with the description from which `create` builds their model.

    For ImageNet, `classes` are WordNet's ids, and `descriptions` are the classes in words.
    """

    name: str  # tag or path, as requested
    model: str  # name of the variant; of a similar variant if `guessed`
    kwargs: dict[str, Any]  # further arguments of `create` that build the weights' model
    num_classes: int  # 0 without a classifier
    classes: tuple[str, ...] | None  # names of the classes, if known
    descriptions: tuple[str, ...] | None
    pretrained_cfg: dict[str, Any]  # preparation of the images, in timm's terms
    user: dict[str, Any]  # metadata that the caller of `save_checkpoint` stored
    guessed: bool  # whether no variant has the layers and widths of the weights
    entry: WeightsEntry | None  # a tag's row of the table; None for a path or hf-hub name
    weights: Weights = field(repr=False, compare=False)

    def check_finite(self) -> None:
        """Raise CheckpointError for infinities and NaN, which a diverged training leaves."""
        bad = [key for key, t in self.weights.tensors.items() if not bool(t.isfinite().all())]
        if bad:
            raise CheckpointError(
                f"{self.name} holds infinities or NaN, in {listed(bad, 3)}: the training "
                "diverged; take an earlier checkpoint"
            )


def open_weights(name: str | os.PathLike[str] | WeightsInfo) -> WeightsInfo:
    """Read the weights of a file, directory, `hf-hub:USER/NAME` or tag; download them if needed.

    A directory (also `local-dir:DIR`) and a hub repository have timm's layout. If the weights have
    no metadata, config.json gives the preparation of the images and the class names.

    Raises:
        InputError: the tag is unknown.
        CheckpointError: the file cannot be found or read, or is not of a TResNet.
    """
    if isinstance(name, WeightsInfo):
        return name
    entry, beside = None, None
    if isinstance(name, str) and name.startswith(HUB):
        path, beside = from_hub_layout(name.removeprefix(HUB))
    else:
        found = locate(name.removeprefix(_LOCAL) if isinstance(name, str) else name)
        entry = found if isinstance(found, WeightsEntry) else None
        path = fetch(found) if isinstance(found, WeightsEntry) else found
        if path.is_dir():
            path, beside = from_layout(path)
    return _info(os.fsdecode(os.fspath(name)), entry, read_weights(path), beside)


def _info(
    name: str, entry: WeightsEntry | None, weights: Weights, beside: Path | None
) -> WeightsInfo:
    """Describe `weights` by their metadata or config.json (`beside`), and by the table's row."""
    guessed, kept = False, (*_ARCHITECTURE, *_HEAD)
    metadata, config = weights.metadata, weights.config
    if config is None:
        found = identify(weights.tensors)
        config, guessed = _guess(found, weights), found.variant is None
        if config.head == "group_attention" and beside is None:
            text = "%s does not say how many classes each group of its head has, so the groups are"
            _log.warning(f"{text} taken as even: give other sizes by head_groups", name)
    if beside is not None and not metadata:
        config, metadata = read_config(beside, config)
        kept = (*kept, *_DROPS)
    known = entry or entries().get(str(metadata.get("tag")))
    cfg: dict[str, Any] = default_pretrained_cfg(config.variant, config)
    stated = metadata.get("pretrained_cfg", {})
    cfg.update({key: value for key, value in stated.items() if value is not None})
    cfg.update({} if entry is None else entry.pretrained_cfg)
    cfg = {key: tuple(v) if isinstance(v, list) else v for key, v in cfg.items()}
    if any(cfg["mean"]) or any(value != 1 for value in cfg["std"]):
        raise CheckpointError(
            f"expected mean 0 and std 1, got {name} for images normalised by mean {cfg['mean']} "
            f"and std {cfg['std']}, while this package feeds images in [0, 1] as they are: "
            "fine-tune them on such images, or normalise yourself and load the file of weights by "
            "tresnet.load_checkpoint(model, FILE)"
        )
    reduction = 8 * config.block_size
    cfg["pool_size"] = tuple(side // reduction for side in cfg["input_size"][1:])
    user = metadata.get("user", {})
    classes, descriptions = user.get("classes"), user.get("descriptions")
    if classes is None and known is not None and known.num_classes == config.num_classes:
        classes, descriptions = class_names(known)
    return WeightsInfo(
        name=name,
        model=config.variant,
        kwargs={key: getattr(config, key) for key in kept},
        num_classes=config.num_classes,
        classes=None if classes is None else tuple(classes),
        descriptions=None if descriptions is None else tuple(descriptions),
        pretrained_cfg=cfg,
        user=user,
        guessed=guessed,
        entry=entry,
        weights=weights,
    )


def _guess(found: Architecture, weights: Weights) -> ModelConfig:
    variant = found.variant or ("tresnet_v2_l" if found.bottlenecks else "tresnet_m")
    row = VARIANTS[variant]
    if min(*found.layers, found.planes, found.stem_channels) < 1:
        raise CheckpointError(
            f"{weights.path} holds only a part of a TResNet (stages "
            f"{'-'.join(map(str, found.layers))}): expected body.conv1.conv.weight and "
            "four stages; save the state dict of the complete model"
        )
    inputs, usual = found.stem_channels, row.block_size
    block_size = next(b for b in (usual, 2, 1) if inputs % b**2 == 0 and inputs >= b**2)
    try:
        return make_config(
            variant,
            layers=found.layers,
            width_factor=row.width_factor if found.variant else found.planes / 64,
            block_size=block_size,
            in_chans=found.stem_channels // block_size**2,
            num_classes=found.num_classes,
            **_head(weights.tensors),
        )
    except InputError as error:
        raise CheckpointError(f"{weights.path} is not a usable TResNet: {error}") from error


def _head(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the head's kind and sizes; its groups are assumed to have equally many classes."""
    queries = tensors.get("head.fc.embed_standart.weight")
    if queries is not None:
        return {"head": "ml_decoder", "head_channels": len(queries)}
    reduced = tensors.get("head.reduce.conv.weight")
    if reduced is None:
        return {}
    branches = tensors.get("head.attention.conv3.bn.weight", reduced)
    groups = len(branches) // len(reduced)
    return {"head": "group_attention", "head_channels": len(reduced), "head_groups": groups}
