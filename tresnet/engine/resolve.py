"""Replace each None in a configuration by the weights' or model's value, and build the model."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tresnet.checkpoints.creation import create
from tresnet.checkpoints.metadata import check_metadata
from tresnet.checkpoints.weights import WeightsInfo
from tresnet.engine import config as configs
from tresnet.engine.config import TrainConfig
from tresnet.errors import ConfigError, listed
from tresnet.models import zoo
from tresnet.models.tresnet import TResNet
from tresnet.settings import EvalTransform, sides

_CROP = ("crop_pct", "crop_mode", "interpolation")


def resolve(config: TrainConfig, weights: WeightsInfo | None = None) -> TrainConfig:
    """Return the configuration with the model's name, input size and test crop filled in.

    An option has priority over a value of the weights. A value of the weights has priority over a
    default of the model. An unknown model raises `InputError`.
    """
    model = config.model.model
    if weights is not None:
        model, cfg = model or weights.model, weights.pretrained_cfg
    else:
        assert model is not None, "checked by validate"
        cfg = zoo.default_pretrained_cfg(model, zoo.make_config(model))
    return configs.replace(config, model=model, **missing(config.data, cfg))


def missing(data: EvalTransform, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of `cfg`, a `pretrained_cfg`, for the fields of `data` that are None."""
    known = {name: cfg[name] for name in _CROP}
    if data.input_size is None:
        known["input_size"] = zoo.image_size(cfg)
    return {name: value for name, value in known.items() if getattr(data, name) is None}


def create_model(
    config: TrainConfig, classes: Sequence[str], weights: WeightsInfo | None = None
) -> TResNet:
    """Build the model of a resolved configuration; unsuitable weights or sizes raise errors."""
    options, data = dataclasses.asdict(config.model), config.data
    for name in ("model", "grad_checkpointing", "weights"):
        del options[name]
    if weights is not None and not options["new_head"]:
        _check_head(weights, classes)
    model = create(config.model.model, weights=weights, num_classes=len(classes), **options)
    assert isinstance(model, TResNet), "features_only is not an option"
    size = data.resolved_input_size
    for each in {size, *data.sizes}:
        model.check_input(torch.empty(1, 3, *sides(each), device="meta"))
    # These values are saved with the weights, so that predictions use the same crop.
    crop = {name: getattr(data, name) for name in _CROP}
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, *sides(size)), **crop}
    return model


def rebuild_model(config: TrainConfig, metadata: dict[str, Any]) -> TResNet:
    """Build a resumed run's model from the metadata of its state, with random weights."""
    options = check_metadata(metadata).to_dict()
    name = options.pop("variant")
    del options["bottlenecks"]  # `build` takes this option from the variant
    model = zoo.build(name, **(config.model.build | options))
    model.pretrained_cfg = metadata["pretrained_cfg"]
    return model


def class_map(
    trained: Sequence[str] | None, outputs: int, found: Sequence[str], subset: bool = False
) -> list[int] | None:
    """Return the model's class index for each label of a data set, or None if they agree.

    `trained` are the model's classes in the order of its outputs, or None if unknown. `found` are
    the data's classes in the order of labels, as names or as class indices. With `subset`, the data
    may lack classes, as ImageNet-R does. Any other difference raises `ConfigError`.
    """
    places = {name: number for number, name in enumerate(trained or ())}
    if subset and set(found) < places.keys():
        return [places[name] for name in found]
    if len(found) != outputs:
        raise ConfigError(
            f"the weights have {outputs} classes, the data {len(found)} ({listed(found, 5)}):"
            " expected the same"
        )
    if trained is None or list(trained) == list(found):
        return None
    numbers = [int(name) if name.isdecimal() else -1 for name in found]
    named = not all(name.isdecimal() for name in trained)
    if named and sorted(numbers) == list(range(outputs)):  # `found` holds class indices as text
        return None if numbers == sorted(numbers) else numbers
    if set(trained) != set(found):
        raise ConfigError(
            "the classes of the weights and of the data differ: only the weights have"
            f" {listed(sorted(set(trained) - set(found)), 5)}; only the data have"
            f" {listed(sorted(set(found) - set(trained)), 5)}"
        )
    return [places[name] for name in found]


def _check_head(info: WeightsInfo, classes: Sequence[str]) -> None:
    try:
        mapping = class_map(info.classes, info.num_classes, classes)
    except ConfigError as error:
        raise ConfigError(f"{error}; --new-head starts a new head for the data") from error
    if mapping is not None:
        raise ConfigError(
            "the weights have the data's classes in another order; --new-head starts a new head"
        )
