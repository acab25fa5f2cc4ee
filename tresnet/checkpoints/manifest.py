"""Published weights and files of weights: where they are and what they are."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tresnet.checkpoints import download
from tresnet.checkpoints.read import read_weights
from tresnet.checkpoints.remap import Architecture, Weights, identify, to_ours
from tresnet.checkpoints.table import (
    WeightsEntry,
    entries,
    find,
    list_weights,
    locate,
    weights_dir,
)
from tresnet.errors import CheckpointError
from tresnet.models.config import ModelConfig
from tresnet.models.zoo import VARIANTS, default_pretrained_cfg

HUB_FILENAME = "model.safetensors"
# what the weights decide about their model, besides the number of classes
_ARCHITECTURE = ("layers", "width_factor", "block_size", "in_chans", "global_pool")
_HEAD = ("head", "head_groups", "head_channels")


@dataclass(frozen=True)
class WeightsInfo:
    """What is known about weights, published or in a file.

    Attributes:
        name: the tag or path asked about.
        model: the variant.
        kwargs: further arguments of `create` that build the weights' model.
        num_classes: width of the classifier; 0 for none.
        input_size: (channels, height, width) of the images.
        crop_pct: part of the resized image's side that is kept.
        crop_mode: 'center' or 'squash'.
        interpolation: of the resize.
        classes: names of the classes, where the file holds them.
        path: the file; None for a tag whose file is not under weights/.
        format: 'tresnet', 'timm' or 'public'.
        pretrained_cfg: the same in timm's terms.
        user: what the caller of `save_checkpoint` stored.
        guessed: no variant has these stages and this width, so `model` is the nearest.
        entry: the row of the table, for a tag.
    """

    name: str
    model: str
    kwargs: dict[str, Any]
    num_classes: int
    input_size: tuple[int, int, int]
    crop_pct: float
    crop_mode: str
    interpolation: str
    classes: tuple[str, ...] | None
    path: Path | None
    format: str
    pretrained_cfg: dict[str, Any]
    user: dict[str, Any]
    guessed: bool = False
    entry: WeightsEntry | None = None


def fetch(tag: str) -> Path:
    """Return the file of a tag: from weights/, then from the cache, then downloaded.

    Downloads go to the caches of huggingface_hub and torch.hub. A known hash is always checked.

    Raises:
        CheckpointError: it cannot be had here, or its hash is wrong.
        InputError: there is no such tag.
    """
    entry = find(tag)
    local = weights_dir() / entry.file
    if local.is_file():
        if entry.sha256 is not None:
            download.verify(local, entry.sha256, tag)
        return local
    try:
        path, published = _download(entry)
    except CheckpointError:
        raise
    except Exception as error:  # the hub's client, its transports and urllib each have their own
        raise CheckpointError(
            f"could not get {tag} ({type(error).__name__}: {error}): connect to the network, or "
            f"put the file of {_address(entry)} at {local} or elsewhere and give its path"
        ) from error
    download.verify(path, entry.sha256 or published, tag)
    return path


def _address(entry: WeightsEntry) -> str:
    if entry.hub_id:
        return f"https://huggingface.co/{entry.hub_id}/resolve/main/{HUB_FILENAME}"
    return entry.url or "the repository"


def _download(entry: WeightsEntry) -> tuple[Path, str | None]:
    """Return the file and the hash its publisher states, if any."""
    if entry.hub_id:
        path = download.from_hub(entry.hub_id, HUB_FILENAME)
        return path, download.hub_sha256(path)
    if entry.url:
        import torch

        cached = Path(torch.hub.get_dir()) / "checkpoints" / entry.file
        return download.from_url(entry.url, cached), None
    raise CheckpointError(
        f"{entry.tag} is not among the files of this installation: expected "
        f"{weights_dir() / entry.file}; get it from the project's repository"
    )


def describe(tag_or_path: str | os.PathLike[str]) -> WeightsInfo:
    """Return what is known about weights, without downloading anything.

    Raises:
        InputError: an unknown tag.
        CheckpointError: the file is unreadable or no TResNet.
    """
    found = locate(tag_or_path)
    if isinstance(found, Path):
        return info(to_ours(read_weights(found)), os.fspath(tag_or_path))
    local = weights_dir() / found.file
    if local.is_file():
        return info(to_ours(read_weights(local)), found.tag, found)
    return _info_of_entry(found)


def _info_of_entry(entry: WeightsEntry) -> WeightsInfo:
    row = VARIANTS[entry.model]
    config = ModelConfig(
        entry.model,
        row.layers,
        row.width_factor,
        row.bottlenecks,
        row.block_size,
        num_classes=entry.num_classes,
    )
    return _make_info(entry.tag, config, {}, entry.format, None, entry)


def info(weights: Weights, name: str, entry: WeightsEntry | None = None) -> WeightsInfo:
    """Return what a file that is read already says of itself, completed by the table."""
    if weights.config is not None:
        config, guessed = weights.config, False
    else:
        found = identify(weights.tensors)
        config, guessed = _guess(found, weights), found.variant is None
    metadata, path = weights.source.metadata or {}, weights.source.path
    made = _make_info(name, config, metadata, weights.format, path, entry)
    return replace(made, guessed=guessed)


def _make_info(
    name: str,
    config: ModelConfig,
    metadata: dict[str, Any],
    format: str,
    path: Path | None,
    entry: WeightsEntry | None,
) -> WeightsInfo:
    cfg = default_pretrained_cfg(config.variant, config)
    cfg.update(metadata.get("pretrained_cfg", {}))
    cfg.update({} if entry is None else entry.pretrained_cfg)
    for key in [key for key, value in cfg.items() if isinstance(value, list)]:
        cfg[key] = tuple(cfg[key])
    reduction = 8 * config.block_size
    cfg["pool_size"] = tuple(side // reduction for side in cfg["input_size"][1:])
    user = metadata.get("user", {})
    return WeightsInfo(
        name=name,
        model=config.variant,
        kwargs={key: getattr(config, key) for key in (*_ARCHITECTURE, *_HEAD)},
        num_classes=config.num_classes,
        input_size=cfg["input_size"],
        crop_pct=cfg["crop_pct"],
        crop_mode=cfg["crop_mode"],
        interpolation=cfg["interpolation"],
        classes=tuple(user["classes"]) if "classes" in user else None,
        path=path,
        format=format,
        pretrained_cfg=cfg,
        user=user,
        entry=entry,
    )


def _guess(found: Architecture, weights: Weights) -> ModelConfig:
    """Return a configuration for weights without metadata: a row of the table, or one like it."""
    variant = found.variant or ("tresnet_v2_l" if found.bottlenecks else "tresnet_m")
    row = VARIANTS[variant]
    if min(*found.layers, found.planes, found.stem_channels) < 1:
        raise CheckpointError(
            f"{weights.source.path} holds only a part of a TResNet (stages "
            f"{'-'.join(map(str, found.layers))}): expected body.conv1.conv.weight and four stages; "
            "save the state dict of the whole model"
        )
    block_size = _guess_block_size(found.stem_channels, row.block_size)
    return ModelConfig(
        variant,
        found.layers,
        row.width_factor if found.variant else found.planes / 64,
        found.bottlenecks,
        block_size,
        in_chans=found.stem_channels // block_size**2,
        num_classes=found.num_classes,
    )


def _guess_block_size(stem_channels: int, usual: int) -> int:
    """Return the variant's block size if it divides the stem's inputs, else the next smaller."""
    return next(b for b in (usual, 2, 1) if stem_channels % b**2 == 0 and stem_channels >= b**2)


__all__ = [
    "WeightsEntry",
    "WeightsInfo",
    "describe",
    "entries",
    "fetch",
    "find",
    "info",
    "list_weights",
    "locate",
    "weights_dir",
]
