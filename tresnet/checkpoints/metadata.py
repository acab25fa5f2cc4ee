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


def _expect(fits: bool, expected: str, got: object) -> None:
    if not fits:
        raise InputError(f"expected {expected}, got {got!r:.80}")


def _dict_at(metadata: Mapping[str, Any], key: str) -> dict[str, Any]:
    values = metadata.get(key, {})
    _expect(isinstance(values, dict), f"{key} with named values", values)
    return values


def _check_images(cfg: dict[str, Any], config: ModelConfig) -> None:
    channels = config.in_chans
    size = cfg.get("input_size", [channels, 1, 1])
    fits = isinstance(size, list) and len(size) == 3 and size[0] == channels
    _expect(fits, f"input_size ({channels}, height, width)", size)
    for key in ("mean", "std"):
        _expect(isinstance(cfg.get(key, []), list), f"{key} as a list of numbers", cfg.get(key))
    if "pixel_dtype" in cfg:
        statistics = [cfg.get("mean"), cfg.get("std")]
        numbers = [n for each in statistics for n in each or () if type(n) is float]
        finite = all(map(math.isfinite, numbers)) and len(numbers) == 2 * channels
        sound = channels != 3 and finite and min(cfg["std"]) > 0
        _expect(sound, f"mean and std of {channels} channels", statistics)
        _expect(isinstance(cfg["pixel_dtype"], str), "pixel_dtype as a name", cfg["pixel_dtype"])
    crop = {key: cfg[key] for key in CROP if key in cfg}
    check(EvalTransform(input_size=(size[1], size[2]), **crop), InputError, str)


def _check_user(user: dict[str, Any], config: ModelConfig) -> None:
    count = config.num_classes
    for key in ("classes", "descriptions"):
        if (names := user.get(key)) is not None:
            strings = isinstance(names, list) and all(isinstance(name, str) for name in names)
            _expect(strings, f"{key} as a list of names", names)
            _expect(len(names) == count or not count, f"the names of {count} classes", len(names))
    labels, threshold = user.get("labels", "single"), user.get("threshold")
    _expect(labels in ("single", "multi"), "labels 'single' or 'multi'", labels)
    if threshold is not None:
        several = isinstance(threshold, list)
        numbers = threshold if several else [threshold]
        fits = all(isinstance(n, int | float) and 0 <= n <= 1 for n in numbers)
        fits = fits and len(numbers) == (count if several else 1)
        what = f"a list of {count} numbers" if several else "a number"
        _expect(fits, f"threshold as {what} from 0 to 1", threshold)
