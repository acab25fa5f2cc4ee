"""Table of model variants, and functions that build and describe a variant."""

import dataclasses
import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tresnet.devices import usable_device
from tresnet.errors import InputError, check_known, listed
from tresnet.models.tresnet import TResNet
from tresnet.settings import sides
from tresnet.settings.model import OPTIONS, ModelConfig

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DEFAULT_INPUT_SIZE = 224  # side of images in pixels, except for tresnet_t


@dataclass(frozen=True)
class Variant:
    """Fields of a variant's `ModelConfig`, and the side of its square images in pixels."""

    layers: tuple[int, int, int, int]
    width_factor: float = 1.0
    bottlenecks: bool = False
    block_size: int = 4
    input_size: int = DEFAULT_INPUT_SIZE


# Table 2 of the paper has the variants m, l and xl. The authors' ImageNet-21K release has v2_l, and
# the authors' code has s. v2_xl is the tresnet_xl of ML-Decoder's code; d is ML-Danbooru's. This
# project adds t for small images, tests and demos.
VARIANTS: dict[str, Variant] = {
    "tresnet_t": Variant((2, 2, 3, 2), 0.25, block_size=2, input_size=32),
    "tresnet_s": Variant((3, 4, 7, 3)),
    "tresnet_m": Variant((3, 4, 11, 3)),
    "tresnet_l": Variant((4, 5, 18, 3), 1.2),
    "tresnet_xl": Variant((4, 5, 24, 3), 1.3),
    "tresnet_d": Variant((3, 6, 14, 3), bottlenecks=True),
    "tresnet_v2_l": Variant((3, 4, 23, 3), bottlenecks=True),
    "tresnet_v2_xl": Variant((3, 8, 34, 5), bottlenecks=True),
}


def list_models(pattern: str = "*") -> list[str]:
    """Return the sorted names of models that match a shell pattern."""
    return sorted(fnmatch.filter(VARIANTS, pattern))


def default_crop_pct(input_size: int | tuple[int, int], crop_mode: str = "center") -> float:
    """Return the default `crop_pct`: 0.875 for center crops of at least 224 pixels, otherwise 1."""
    large = min(sides(input_size)) >= DEFAULT_INPUT_SIZE
    return 0.875 if crop_mode == "center" and large else 1.0


def find_variant(name: str) -> Variant:
    """Return the variant `name`; for an unknown name, raise `InputError` with the nearest name."""
    check_known("model", name, VARIANTS)
    return VARIANTS[name]


def make_config(name: str, **options: Any) -> ModelConfig:
    """Return a variant's configuration with `options` applied; invalid ones raise `InputError`."""
    variant = dataclasses.asdict(find_variant(name))
    del variant["input_size"]
    for key in options:
        check_known("option", key, OPTIONS)
    chosen = {key: value for key, value in options.items() if value is not None}
    return ModelConfig(variant=name, **{**variant, **chosen}).checked()


def build(
    name: str,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> TResNet:
    """Build the variant `name` with random weights, in training mode, and without a `runner`.

    On the device `meta`, no memory is allocated. `dtype` is float32, float64, bfloat16 or float16,
    or None for PyTorch's default. `options` are fields of `ModelConfig`; if one is None, the
    variant's value stays. `InputError`: a name or value is invalid, or the device is not usable.
    `MissingDependencyError`: norm='inplace_abn' needs the inplace-abn package.
    """
    if device is not None and not str(device).startswith("meta"):
        usable_device(device)
    if dtype is not None and dtype not in _DTYPES:
        raise InputError(f"expected dtype out of {listed(_DTYPES)}, got {dtype!r}")
    model = TResNet(make_config(name, **options), device, dtype)
    model.pretrained_cfg = default_pretrained_cfg(name, model.config)
    return model


def default_pretrained_cfg(name: str, config: ModelConfig) -> dict[str, Any]:
    """Return timm's dict `pretrained_cfg` for the variant `name` with configuration `config`."""
    size = find_variant(name).input_size
    side = size // (8 * config.block_size)
    return {
        "architecture": name,
        "num_classes": config.num_classes,
        "input_size": (config.in_chans, size, size),
        "pool_size": (side, side),
        "crop_pct": default_crop_pct(size),
        "crop_mode": "center",
        "interpolation": "bilinear",
        "mean": (0.0,) * config.in_chans,
        "std": (1.0,) * config.in_chans,
        "first_conv": "body.conv1.conv",
        "classifier": "head.fc",
        "license": "apache-2.0",
    }


def image_size(cfg: Mapping[str, Any]) -> int | tuple[int, int]:
    """Return the side of a `pretrained_cfg`'s images, or (height, width) if the two differ."""
    _, height, width = cfg["input_size"]
    return int(width) if height == width else (int(height), int(width))
