"""Open a file of weights as a `Checkpoint`: its tensors, and the description of their model."""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from tresnet.checkpoints.locate import Published, Source, class_names, entries, locate
from tresnet.checkpoints.metadata import read_metadata, read_names, read_stated
from tresnet.checkpoints.read import UNKNOWN, Contents, by_prefix, read_file
from tresnet.checkpoints.rename import OUR_NAMES, rename
from tresnet.errors import CheckpointError, InputError, listed
from tresnet.models.zoo import VARIANTS, default_pretrained_cfg, make_config
from tresnet.settings.model import ModelConfig

_log = logging.getLogger(__name__)
_STATED = "as the file states"
# Negative slopes of timm's and the authors' code, whose files do not state them. The defaults of
# `ModelConfig` have these values too, but may change without these.
SLOPES = {"stem_slope": 1e-2, "block_slope": 1e-3}
# Of all published files, only TResNet's tresnet_v2_l of 196 cars has other slopes.
_CARS, _SLOPES_OF_CARS = ("tresnet_v2_l", 196, "linear"), {"stem_slope": 1e-6, "block_slope": 1e-6}
# Numbers of classes of the published files in which an image has one label: cars and ImageNet.
_ONE_LABEL = (196, 1000, 11221)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Weights of a file, with our names and gammas, and the model that `create` builds for them."""

    name: str  # as requested
    path: Path  # of the file of weights, or of the index of several files
    entry: Published | None  # of a tag
    format: str  # 'tresnet' (with metadata), 'timm' or 'public' (the format of the authors' code)
    origin: str  # whose names the tensors have in the file
    config: ModelConfig  # with the default norm; the variant is a guess if `guessed`
    guessed: bool  # whether no variant has layers and widths like the weights
    slopes_source: str  # why the slopes are these
    labels_source: str  # why an image has one label or several
    pretrained_cfg: dict[str, Any]  # timm's dict on resizing, cropping and origin
    user: dict[str, Any]  # as `save_checkpoint` stores it: classes, labels, threshold, ...
    # Names of layers that this package does not know are those of the file, after `UNKNOWN`.
    tensors: dict[str, Tensor] = field(repr=False, compare=False)

    @property
    def num_classes(self) -> int:
        return self.config.num_classes

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes, for ImageNet WordNet ids such as n01440764; None if unknown."""
        return tuple(self.user.get("classes") or ()) or None

    @property
    def descriptions(self) -> tuple[str, ...] | None:
        """The classes in words such as tench; None if unknown."""
        return tuple(self.user.get("descriptions") or ()) or None

    @property
    def labels(self) -> str:
        """'single', or 'multi' if an image may have several labels."""
        return self.user.get("labels", "single")

    @property
    def pixels(self) -> str:
        """Values of the images that the model takes, in words."""
        if mean_and_std := self.normalised_by:
            return "normalised by mean {} and std {}".format(*mean_and_std)
        if (kept := self.pretrained_cfg.get("pixel_dtype")) is None:
            return "in [0, 1], without mean and deviation"
        channels = self.config.in_chans
        return f"{channels} channels of {kept}, normalised by their mean and deviation"

    @property
    def normalised_by(self) -> tuple[Sequence[float], Sequence[float]] | None:
        """Mean and deviation of images that this package feeds without them; None: no such."""
        mean, std = self.pretrained_cfg["mean"], self.pretrained_cfg["std"]
        if "pixel_dtype" in self.pretrained_cfg:  # train.py measured both
            return None
        return (mean, std) if any(mean) or any(value != 1 for value in std) else None

    @property
    def other_layers(self) -> list[str]:
        """Names of heads and other layers that this package does not know, for `by_prefix`."""
        kinds = UNKNOWN if self.num_classes else (UNKNOWN, "head.")
        return [name for name in self.tensors if name.startswith(kinds)]

    def facts(self) -> dict[str, str]:
        """Say what the file is, for `tresnet info`: its format, head, slopes and images."""
        config, size = self.config, self.pretrained_cfg["input_size"]
        usual = default_pretrained_cfg(config.variant, config)["input_size"]
        stated = self.format == "tresnet" or self.entry or size != usual
        queries = f", {config.head_queries} groups" if config.head_queries else ""
        kind = "any number of labels" if self.labels == "multi" else "one label"
        facts = {
            "format": f"{self.format}: {self.origin}",
            "model": config.variant + (", the nearest variant" if self.guessed else ""),
            "head": f"{config.head}{queries}, {self.num_classes} classes, {kind} per image, "
            f"{self.labels_source}",
            "slopes": f"{config.stem_slope:g} in the stem, {config.block_slope:g} in the blocks, "
            f"{self.slopes_source}",
            "images": f"{size[1]}x{size[2]}{'' if stated else ' (the default: not stated)'}, "
            f"{self.pixels}",
        }
        if self.other_layers:
            facts["head"] = "not of this package, so only the body can be loaded (num_classes=0)"
            facts["unknown"] = by_prefix(self.other_layers)
        return facts

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
        return replace(self, user={**user, "classes": list(classes)})

    def check_finite(self) -> None:
        """Raise CheckpointError for infinities and NaN, which result from a diverged training."""
        bad = [key for key, t in self.tensors.items() if not bool(t.isfinite().all())]
        if bad:
            raise CheckpointError(
                f"{self.name} holds infinities or NaN, in {listed(bad, 3)}: the training "
                "diverged; take an earlier checkpoint"
            )


def open_checkpoint(name: str | os.PathLike[str] | Checkpoint) -> Checkpoint:
    """Read the weights of a file, directory, `hf-hub:USER/NAME` or tag; download them if needed.

    Directories (also `local-dir:DIR`) and hub repositories need timm's layout. Unless the file of
    weights has metadata, config.json gives options, image settings and class names.

    Raises:
        InputError: the tag is unknown.
        CheckpointError: the file cannot be found or read, or is not of a TResNet.
    """
    if isinstance(name, Checkpoint):
        return name
    source = locate(name)
    return describe(source, read_file(source.path))


def _slopes(config: ModelConfig, may_be_cars: bool) -> tuple[dict[str, float], str]:
    """Return the slopes of a file that may not state them, and their source in words."""
    if may_be_cars and (config.variant, config.num_classes, config.head) == _CARS:
        return _SLOPES_OF_CARS, "as of TResNet's file of 196 cars alone"
    return SLOPES, "as in the code that has such names"


def describe(source: Source, contents: Contents, part_of: ModelConfig | None = None) -> Checkpoint:
    """Find the model of a file's tensors, and what else the file, its format and its tag say.

    A file that lacks stages, or the stem, is taken for a part of the model `part_of`, or refused.
    """
    metadata = read_metadata(source.path, contents)
    tensors, rows = rename(source.path, contents.tensors, contents.prefix.rpartition(UNKNOWN)[2])
    config, guessed = _config_of_tensors(source.path, tensors, part_of)
    format, origin, stated = rows[0].format, " and ".join(row.origin for row in rows), {}
    names, by_index = None, False
    if metadata is not None:
        stated, own = metadata
        if summary(own) != summary(config):
            raise CheckpointError(
                f"{source.path} says it holds {summary(own)}, but its tensors are of "
                f"{summary(config)}: it is damaged; copy or download it again"
            )
        config = replace(own, drop_rate=0.0, drop_path_rate=0.0)
        format, origin, guessed, slopes_source = "tresnet", "this package", False, _STATED
    else:
        names, by_index = read_names(source.path, contents, config.num_classes)
        slopes, slopes_source = _slopes(config, rows[0].in_place and names is None)
        config = replace(config, **slopes)
        if source.config_json is None and config.head == "group_attention":
            text = "%s does not state the number of classes in each group of the head: equal groups"
            _log.warning(f"{text} are assumed; give other sizes by head_groups", source.name)
        config, stated = read_stated(source, contents, config)
        if any(getattr(config, name) != value for name, value in slopes.items()):
            slopes_source = _STATED
    entry = source.entry or entries().get(str(stated.get("tag")))
    if entry is not None and entry.num_classes != config.num_classes:
        entry = None
    user, descriptions = stated.get("user", {}), None
    if names is None and entry is not None:
        names, descriptions = class_names(entry)
    if names is not None and user.get("classes", list(names)) == list(names):
        found = {"classes": names, "descriptions": descriptions}
        user = {key: list(texts) for key, texts in found.items() if texts is not None} | user
    labels_source = _STATED
    if "labels" not in user and format != "tresnet":
        several = by_index or any(row.several_labels for row in rows)
        if entry is None and several and config.num_classes not in _ONE_LABEL:
            user = {**user, "labels": "multi"}
        labels_source = "a guess" if entry is None else "as published"
    return Checkpoint(
        name=source.name,
        path=source.path,
        entry=source.entry,
        format=format,
        origin=origin,
        config=replace(config, norm="abn", jit=False),
        guessed=guessed,
        slopes_source=slopes_source,
        labels_source=labels_source,
        pretrained_cfg=_pretrained_cfg(config, stated.get("pretrained_cfg", {}), source.entry),
        user=user,
        tensors=tensors,
    )


def _pretrained_cfg(
    config: ModelConfig, stated: Mapping[str, Any], entry: Published | None
) -> dict[str, Any]:
    cfg: dict[str, Any] = default_pretrained_cfg(config.variant, config)
    cfg |= {key: value for key, value in stated.items() if value is not None}
    cfg |= {} if entry is None else entry.pretrained_cfg
    cfg = {key: tuple(v) if isinstance(v, list) else v for key, v in cfg.items()}
    side = 8 * config.block_size
    return cfg | {"pool_size": tuple(size // side for size in cfg["input_size"][1:])}


def _config_of_tensors(
    path: Path, tensors: Mapping[str, Tensor], part_of: ModelConfig | None
) -> tuple[ModelConfig, bool]:
    """Return the configuration that fits names and shapes, and whether its variant is a guess.

    One missing tensor is no obstacle, so that `fit` can name it.
    """
    matches = (re.match(r"body\.layer([1-4])\.(\d+)\.", key) for key in tensors)
    blocks = {match.groups() for match in matches if match}  # (stage, index)
    layers = tuple(sum(stage == one for one, _ in blocks) for stage in "1234")
    stem = tensors.get("body.conv1.conv.weight")
    planes, inputs = stem.shape[:2] if stem is not None and stem.dim() == 4 else (0, 0)
    bottlenecks = any(key.startswith("body.layer1.0.conv3.") for key in tensors)
    if min(*layers, planes, inputs) < 1:
        if part_of is not None:
            return part_of, True
        odd = [name for name in tensors if not OUR_NAMES.fullmatch(name)]
        raise CheckpointError(
            f"{path} holds only a part of a TResNet (stages {'-'.join(map(str, layers))}): "
            "expected body.conv1.conv.weight and four stages; save the state dict of the complete "
            f"model{'. Unknown: ' if odd else ''}{by_prefix(odd) if odd else ''}"
        )
    exact = _variant(layers, planes, bottlenecks)
    variant = exact or ("tresnet_v2_l" if bottlenecks else "tresnet_m")
    usual = VARIANTS[variant]
    block_size = next(b for b in (usual.block_size, 2, 1) if inputs % b**2 == 0 and inputs >= b**2)
    try:
        config = make_config(
            variant,
            layers=layers,
            width_factor=usual.width_factor if exact else planes / 64,
            block_size=block_size,
            in_chans=inputs // block_size**2,
            **{"num_classes": 0, **_head(tensors)},
        )
    except (InputError, LookupError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path} is not a usable TResNet: {error}") from error
    return config, exact is None


def _head(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the options of the head that has these tensors; a head of others has 0 classes."""
    own = {k.removeprefix("head."): t for k, t in tensors.items() if k.startswith("head.")}

    def has(pattern: str) -> bool:
        return any(re.match(pattern, name) for name in own)

    def size(name: str) -> int:  # of the weight, or of the bias if the weight is missing
        parts = (own[key] for key in (f"{name}.weight", f"{name}.bias") if key in own)
        return next((len(part) for part in parts if part.dim()), 0)

    if has(r"fc\.(decoder|embed_standart|query_embed|duplicate_pooling)"):
        pooling = own.get("fc.duplicate_pooling", torch.empty(0, 0, 0))
        queries = len(own.get("fc.query_embed.weight", pooling))
        # without the bias, which will be said to be missing, the number of classes is a guess
        classes = len(own.get("fc.duplicate_pooling_bias", ())) or queries * pooling.shape[-1]
        options = {"head": "ml_decoder", "num_classes": classes}
        options["head_channels"] = size("fc.embed_standart")
        options["head_queries"] = None if queries == min(100, classes) else queries
    elif has(r"fc\.[01]\."):
        options = {"head": "bottleneck", "num_classes": size("fc.1"), "head_channels": size("fc.0")}
    elif has(r"(reduce|attention)\."):
        width = size("reduce.conv") or size("reduce.bn")
        groups = size("attention.conv3.bn") // max(width, 1) or 1
        options = {"head": "group_attention", "num_classes": size("fc"), "head_groups": groups}
        options["head_channels"] = width
    else:
        options = {"head": "linear", "num_classes": size("fc")}
    strange = any(name.startswith(f"{UNKNOWN}head.") for name in tensors)
    return {} if strange or 0 in options.values() else options


def _variant(layers: Sequence[int], planes: int, bottlenecks: bool) -> str | None:
    wanted = (*layers, planes, bottlenecks)
    rows = ((name, make_config(name)) for name in VARIANTS)
    return next((n for n, c in rows if (*c.layers, c.planes, c.bottlenecks) == wanted), None)


def summary(config: ModelConfig) -> str:
    """Describe what the names and shapes of a model's tensors determine of its configuration."""
    name = _variant(config.layers, config.planes, config.bottlenecks) or "a TResNet"
    return (
        f"{name} (stages {'-'.join(map(str, config.layers))}, {config.planes} base channels, "
        f"{config.in_chans * config.block_size**2} stem inputs, {config.num_classes} classes, head "
        f"{config.head if config.num_classes else 'linear'})"
    )
