"""The table of variants and the function that builds a row of it."""

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tresnet.errors import InputError
from tresnet.models.config import ModelConfig
from tresnet.models.features import FeatureExtractor
from tresnet.models.heads import class_groups
from tresnet.models.tresnet import TResNet


@dataclass(frozen=True)
class Variant:
    """One row of the table.

    Attributes:
        layers: blocks in each of the four stages.
        width_factor: channels of the first stage over 64.
        bottlenecks: bottleneck blocks in the first two stages too (version 2).
        block_size: side of the space-to-depth block.
        input_size: side of the square image the variant is meant for, in pixels.
    """

    layers: tuple[int, int, int, int]
    width_factor: float = 1.0
    bottlenecks: bool = False
    block_size: int = 4
    input_size: int = 224


# Paper, table 2 (M, L, XL); the authors' ImageNet-21K release (v2_l); s is the smaller model of their
# code; t is this project's own, for small images, tests and demonstrations.
VARIANTS: dict[str, Variant] = {
    "tresnet_t": Variant((2, 2, 3, 2), 0.25, block_size=2, input_size=32),
    "tresnet_s": Variant((3, 4, 7, 3)),
    "tresnet_m": Variant((3, 4, 11, 3)),
    "tresnet_l": Variant((4, 5, 18, 3), 1.2),
    "tresnet_xl": Variant((4, 5, 24, 3), 1.3),
    "tresnet_v2_l": Variant((3, 4, 23, 3), bottlenecks=True),
}


def list_models(pattern: str = "*") -> list[str]:
    """Return the names `create` accepts, sorted, that match a shell pattern."""
    return sorted(fnmatch.filter(VARIANTS, pattern))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return '; did you mean ...?' for the closest known name, or '' where none is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def find_variant(name: str) -> Variant:
    """Return the row called `name`.

    Raises:
        InputError: there is none; the message suggests the nearest.
    """
    if name not in VARIANTS:
        raise InputError(
            f"unknown model {name!r}{nearest(name, VARIANTS) or '.'} "
            f"Known: {', '.join(list_models())}"
        )
    return VARIANTS[name]


def build(
    name: str,
    *,
    num_classes: int = 1000,
    in_chans: int = 3,
    norm: str = "abn",
    jit: bool = False,
    head: str = "linear",
    head_groups: int | Sequence[int] | None = None,
    head_channels: int | None = None,
    global_pool: str = "avg",
    drop_rate: float = 0.0,
    drop_path_rate: float = 0.0,
    width_factor: float | None = None,
    layers: Sequence[int] | None = None,
    block_size: int | None = None,
    stem_slope: float | None = None,
    block_slope: float | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> TResNet:
    """Build a variant with fresh weights.

    Args:
        name: a name out of `list_models()`.
        num_classes: width of the classifier; 0 for pooled features.
        in_chans: channels of the image.
        norm: 'abn' (one saved buffer), 'batchnorm' or 'inplace_abn' (the package).
        jit: run the helper functions as TorchScript.
        head: 'linear', 'group_attention' or 'ml_decoder'.
        head_groups: classes of each group of 'group_attention', or how many groups to spread the
            classes over; None for 12.
        head_channels: channels of each group, or width of the decoder; None for 512 and 768.
        global_pool: pooling in front of the classifier.
        drop_rate: dropout in front of the classifier.
        drop_path_rate: stochastic depth of the last block.
        width_factor: overrides the variant's.
        layers: overrides the variant's.
        block_size: overrides the variant's; 2 suits images of about 32 pixels.
        stem_slope: negative slope of the stem's activation.
        block_slope: negative slope of the other activations.
        device: where the parameters live.
        dtype: floating-point type of the parameters.

    Returns:
        The model, in training mode.

    Raises:
        InputError: the name or a value is unknown or out of range.
        MissingDependencyError: `norm='inplace_abn'` without the package.
    """
    variant = find_variant(name)
    overrides: dict[str, Any] = {
        "width_factor": width_factor,
        "block_size": block_size,
        "layers": None if layers is None else tuple(layers),
        "stem_slope": stem_slope,
        "block_slope": block_slope,
    }
    row = {
        "layers": variant.layers,
        "width_factor": variant.width_factor,
        "block_size": variant.block_size,
    }
    config = ModelConfig(
        variant=name,
        bottlenecks=variant.bottlenecks,
        in_chans=in_chans,
        num_classes=num_classes,
        norm=norm,
        jit=jit,
        head=head,
        head_groups=class_groups(head, num_classes, head_groups),
        head_channels=head_channels,
        global_pool=global_pool,
        drop_rate=drop_rate,
        drop_path_rate=drop_path_rate,
        **{**row, **{key: value for key, value in overrides.items() if value is not None}},
    )
    model = TResNet(config, device, dtype)
    model.pretrained_cfg = default_pretrained_cfg(name, config)
    return model


def default_pretrained_cfg(name: str, config: ModelConfig) -> dict[str, Any]:
    """Return how images are prepared for a variant, in timm's terms.

    A `crop_mode` of 'squash' resizes to the exact size without keeping the aspect ratio.
    """
    size = find_variant(name).input_size
    side = size // (8 * config.block_size)
    return {
        "architecture": name,
        "num_classes": config.num_classes,
        "input_size": (config.in_chans, size, size),
        "pool_size": (side, side),
        "crop_pct": 0.875 if size >= 224 else 1.0,
        "crop_mode": "center",
        "interpolation": "bilinear",
        "mean": (0.0,) * config.in_chans,
        "std": (1.0,) * config.in_chans,
        "first_conv": "body.conv1.conv",
        "classifier": "head.fc",
        "license": "apache-2.0",
    }


__all__ = [
    "VARIANTS",
    "FeatureExtractor",
    "Variant",
    "build",
    "find_variant",
    "list_models",
    "nearest",
]
