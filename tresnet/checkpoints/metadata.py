"""Check the metadata in files of weights, and read timm's config.json."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tresnet.errors import CheckpointError, InputError, check_known
from tresnet.models.zoo import find_variant
from tresnet.settings import CROP, EvalTransform
from tresnet.settings.fields import check
from tresnet.settings.model import OPTIONS, ModelConfig

# Keys allowed in model_args of timm's config.json: no slopes, which follow from the format.
MODEL_ARGS = {name for name in OPTIONS if not name.endswith("_slope")}
_IMAGE_KEYS = ("input_size", *CROP, "mean", "std", "pixel_dtype")


def check_metadata(metadata: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration in the metadata; raise InputError if any metadata are invalid."""
    config = ModelConfig.from_dict(_dict_at(metadata, "config"))
    find_variant(config.variant)
    _check_images(_dict_at(metadata, "pretrained_cfg"), config)
    _check_user(_dict_at(metadata, "user"), config)
    return config


def read_config(path: Path, config: ModelConfig) -> tuple[ModelConfig, dict[str, Any]]:
    """Return the model's configuration, and metadata on images and classes, from config.json.

    `config` is the configuration that fits the tensors; `model_args` in the file override its
    fields. CheckpointError: the file is damaged, or has unknown or invalid values.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        cfg, names = _dict_at(content, "pretrained_cfg") or content, content.get("label_names")
        if isinstance(names, dict):  # a dict from each class index to the name
            names = [names[str(number)] for number in range(len(names))]
        descriptions = _dict_at(content, "label_descriptions")  # the keys are class names
        user = {} if names is None else {"classes": names}
        if names and descriptions:
            user["descriptions"] = [descriptions.get(name, name) for name in names]
        if kind := content.get("problem_type"):  # as transformers' pipelines read it
            user["labels"] = "multi" if kind == "multi_label_classification" else "single"
            user["threshold"] = content.get("threshold")
        args = _dict_at(content, "model_args")
        args = {key: value for key, value in args.items() if value is not None}
        for name in args:
            check_known("argument of a model", name, MODEL_ARGS)
        config = ModelConfig.from_dict({**config.to_dict(), **args})
        metadata = {
            "pretrained_cfg": {key: cfg[key] for key in _IMAGE_KEYS if key in cfg},
            "user": user,
            "tag": f"{content.get('architecture')}.{cfg.get('tag')}",
        }
        _check_images(metadata["pretrained_cfg"], config)
        _check_user(metadata["user"], config)
    except Exception as error:  # damaged JSON raises errors of many types
        kind = type(error).__name__
        raise CheckpointError(f"expected timm's config.json in {path} ({kind}): {error}") from error
    return config, metadata


def _dict_at(metadata: Mapping[str, Any], key: str) -> dict[str, Any]:
    values = metadata.get(key, {})
    if not isinstance(values, dict):
        raise InputError(f"expected {key} with named values, got {values!r:.80}")
    return values


def _check_images(cfg: dict[str, Any], config: ModelConfig) -> None:
    size = cfg.get("input_size", [config.in_chans, 1, 1])
    if not isinstance(size, list) or len(size) != 3 or size[0] != config.in_chans:
        raise InputError(
            f"expected input_size ({config.in_chans}, height, width), got {size!r:.80}"
        )
    for key in ("mean", "std"):
        if not isinstance(cfg.get(key, []), list):
            raise InputError(f"expected {key} as a list of numbers, got {cfg[key]!r:.80}")
    if "pixel_dtype" in cfg:
        statistics = [cfg.get("mean"), cfg.get("std")]
        numbers = [n for each in statistics for n in each or () if type(n) is float]
        finite = all(map(math.isfinite, numbers)) and len(numbers) == 2 * config.in_chans
        if config.in_chans == 3 or not finite or min(cfg["std"]) <= 0:
            raise InputError(
                f"expected mean and std of {config.in_chans} channels, got {statistics!r:.80}"
            )
        if not isinstance(cfg["pixel_dtype"], str):
            raise InputError(f"expected pixel_dtype as a name, got {cfg['pixel_dtype']!r:.80}")
    crop = {key: cfg[key] for key in CROP if key in cfg}
    check(EvalTransform(input_size=(size[1], size[2]), **crop), InputError, str)


def _check_user(user: dict[str, Any], config: ModelConfig) -> None:
    labels = user.get("labels", "single")
    for key in ("classes", "descriptions"):
        names = user.get(key)
        if names is None:
            continue
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InputError(f"expected {key} as a list of names, got {names!r:.80}")
        if config.num_classes and len(names) != config.num_classes:
            raise InputError(
                f"expected the names of {config.num_classes} classes, got {len(names)}"
            )
    if labels not in ("single", "multi"):
        raise InputError(f"expected labels 'single' or 'multi', got {labels!r:.80}")
    if (threshold := user.get("threshold")) is not None:
        numbers = threshold if isinstance(threshold, list) else [threshold]
        several = isinstance(threshold, list)
        fits = not several or len(threshold) == config.num_classes
        if not fits or not all(isinstance(n, int | float) and 0 <= n <= 1 for n in numbers):
            what = f"a list of {config.num_classes} numbers" if several else "a number"
            raise InputError(f"expected threshold as {what} from 0 to 1, got {threshold!r:.80}")
