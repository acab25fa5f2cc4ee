"""Fills in what a configuration leaves to the model or the weights, and builds the model."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from tresnet.checkpoints.creation import create
from tresnet.checkpoints.weights import describe
from tresnet.engine import config as configs
from tresnet.engine.config import ModelConfig, TrainConfig
from tresnet.errors import ConfigError
from tresnet.models import zoo
from tresnet.models.padding import pad_channels
from tresnet.models.tresnet import TResNet


def resolve(config: TrainConfig) -> TrainConfig:
    """The configuration with the model's name, input size and test crop filled in.

    What the options say stays; else what the weights were trained with; else the variant's own.

    Raises:
        InputError: No model has that name.
        CheckpointError: The weights are unknown or unreadable.
    """
    model, known = input_defaults(config.model.model, config.model.weights)
    given = configs.flatten(config)
    missing = {name: value for name, value in known.items() if given[name] is None}
    return configs.replace(config, model=model, **missing)


def input_defaults(model: str | None, weights: str | None) -> tuple[str, dict[str, Any]]:
    """The variant, and the input_size, crop_pct, crop_mode and interpolation it is used with.

    Raises:
        ConfigError: Neither a model nor weights are named.
        InputError: No model has that name.
        CheckpointError: The weights are unknown or unreadable.
    """
    if weights is not None:
        info = describe(weights)
        return model or info.model, {
            "input_size": info.input_size[-1],
            "crop_pct": info.crop_pct,
            "crop_mode": info.crop_mode,
            "interpolation": info.interpolation,
        }
    if model is None:
        raise ConfigError("--model: name a model, or --weights that say which it is")
    size = zoo.find_variant(model).input_size
    return model, {
        "input_size": size,
        "crop_pct": zoo.default_crop_pct(size),
        "crop_mode": "center",
        "interpolation": "bilinear",
    }


def create_model(config: TrainConfig, classes: Sequence[str]) -> TResNet:
    """Build the model of a resolved configuration for these classes.

    Raises:
        ConfigError: The weights' head is kept, but it was trained on other classes.
        CheckpointError: The weights do not fit the model or the number of classes.
        InputError: A value is out of range, or the model cannot take images of that size.
    """
    settings, data = config.model, config.data
    if settings.weights is not None and not settings.new_head:
        _check_head(settings, classes)
    options = dataclasses.asdict(settings)
    for name in ("model", "grad_checkpointing", "recompute", "impl", "pad"):
        del options[name]
    model = create(settings.model, num_classes=len(classes), **options)
    assert isinstance(model, TResNet), "features_only is not an option"
    if settings.impl != "auto":
        model.set_impl(settings.impl)
    if settings.recompute != "activations":
        model.set_recompute(settings.recompute)
    if settings.pad:
        model = pad_channels(model, inplace=True)
    assert data.input_size is not None, "filled in by resolve"
    model.check_input(torch.empty(1, 3, data.input_size, data.input_size, device="meta"))
    # what is saved with the weights, so that whoever loads them prepares images the same way
    model.pretrained_cfg = {
        **model.pretrained_cfg,
        "input_size": (3, data.input_size, data.input_size),
        "crop_pct": data.crop_pct,
        "crop_mode": data.crop_mode,
        "interpolation": data.interpolation,
    }
    return model


def class_map(
    trained: Sequence[str] | None, outputs: int, found: Sequence[str]
) -> list[int] | None:
    """The model's class of each label of a data set.

    Args:
        trained: The model's classes in the order of its outputs, if known.
        outputs: How many outputs it has.
        found: The data set's classes in the order of its labels.

    Returns:
        A list as long as `found`, or None where the numbers are the same.

    Raises:
        ConfigError: The classes differ, or, where names are unknown, their number.
    """
    if len(found) != outputs:
        raise ConfigError(
            f"the weights have {outputs} classes, the data {len(found)} ({_some(found)}): expected"
            " the same"
        )
    if trained is None or list(trained) == list(found):
        return None
    if set(trained) != set(found):
        raise ConfigError(
            "the classes of the weights and of the data differ: only the weights have"
            f" {_some(sorted(set(trained) - set(found)))}; only the data have"
            f" {_some(sorted(set(found) - set(trained)))}"
        )
    return [list(trained).index(name) for name in found]


def _check_head(settings: ModelConfig, classes: Sequence[str]) -> None:
    info = describe(settings.weights or "")
    try:
        mapping = class_map(info.classes, info.num_classes, classes)
    except ConfigError as error:
        raise ConfigError(f"{error}; --new-head starts a new head for the data") from error
    if mapping is not None:
        raise ConfigError(
            "the weights have the data's classes in another order; --new-head starts a new head"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "none"
