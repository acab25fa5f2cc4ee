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


def fill_in(config: TrainConfig, weights: WeightsInfo | None = None) -> TrainConfig:
    """Fill in the model's name, input size and test crop from the weights, or from the model."""
    model = config.model.model
    if weights is not None:
        model, cfg = model or weights.model, weights.pretrained_cfg
    else:
        assert model is not None, "checked by validate"
        cfg = zoo.default_pretrained_cfg(model, zoo.make_config(model))
    return configs.replace(config, model=model, **missing(config.data, cfg))


def missing(data: EvalTransform, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of `cfg`, a `pretrained_cfg`, for the fields of `data` that are None."""
    values = {name: cfg[name] for name in _CROP}
    if data.input_size is None:
        values["input_size"] = zoo.image_size(cfg)
    return {name: value for name, value in values.items() if getattr(data, name) is None}


def create_model(
    config: TrainConfig,
    classes: Sequence[str],
    weights: WeightsInfo | None = None,
    new_head: bool = False,
) -> TResNet:
    """Build the model of a filled-in configuration; unsuitable weights or sizes raise errors."""
    options, data = dataclasses.asdict(config.model), config.data
    for name in ("model", "grad_checkpointing", "weights"):
        del options[name]
    options |= {"num_classes": len(classes), "new_head": new_head}
    model = create(config.model.model, weights=weights, **options)
    assert isinstance(model, TResNet), "features_only is not an option"
    size = data.resolved_input_size
    for each in {size, *data.sizes}:
        # Checks the size, runs nothing.
        model.check_input(torch.empty(1, 3, *sides(each), device="meta"))
    # These values are saved with the weights, so that predictions use the same crop.
    crop = {name: getattr(data, name) for name in _CROP}
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, *sides(size)), **crop}
    return model


def why_new_head(
    config: TrainConfig, weights: WeightsInfo, classes: Sequence[str], asked: bool
) -> str | None:
    """Return why the classifier must be new, or None if that of the weights fits the data."""
    if reason := difference(weights.classes, weights.num_classes, classes):
        return reason
    if config.model.head not in (None, weights.kwargs["head"]):
        return f"the weights have the head {weights.kwargs['head']}, got {config.model.head}"
    if asked:
        return "--new-head is given, though the weights have the data's classes"
    if class_map(weights.classes, weights.num_classes, classes) is not None:
        raise ConfigError(
            "the weights have the data's classes in another order; --new-head starts a new head"
        )
    return None


def origin(model: TResNet, weights: WeightsInfo | None, new_head: str | None) -> str:
    """Return a line that says which groups of tensors come from `weights`."""
    groups = groups_of(model)
    if weights is None:
        return f"random weights: {groups}"
    if new_head is None:
        return f"{groups} from {weights.name}"
    return f"{groups.removesuffix(', head')} from {weights.name}; head new, as {new_head}"


def groups_of(model: TResNet) -> str:
    """Return the names of the model's groups of tensors: stem, stages and head."""
    names = (name.removeprefix("body.").partition(".")[0] for name in model.state_dict())
    return ", ".join(dict.fromkeys("stem" if name == "conv1" else name for name in names))


def rebuild_model(config: TrainConfig, metadata: dict[str, Any]) -> TResNet:
    """Build a resumed run's model from the metadata of its state, with random weights."""
    options = check_metadata(metadata).to_dict()
    name = options.pop("variant")
    del options["bottlenecks"]  # `build` takes this option from the variant
    model = create(name, **(config.model.build | options))
    assert isinstance(model, TResNet)
    model.pretrained_cfg = metadata["pretrained_cfg"]
    return model


def difference(trained: Sequence[str] | None, outputs: int, names: Sequence[str]) -> str | None:
    """Return how classes differ, or None if only their order may differ; see `class_map`."""
    if len(names) != outputs:
        return f"the weights have {outputs} classes, the data {len(names)} ({listed(names, 5)})"
    if trained is None or set(trained) == set(names) or _are_indices(names, trained):
        return None
    return (
        "the classes of the weights and of the data differ: only the weights have"
        f" {listed(sorted(set(trained) - set(names)), 5)}; only the data have"
        f" {listed(sorted(set(names) - set(trained)), 5)}"
    )


def class_map(
    trained: Sequence[str] | None, outputs: int, names: Sequence[str], subset: bool = False
) -> list[int] | None:
    """Return the model's class index for each label of a data set, or None if they agree.

    `trained` are the model's classes in the order of its outputs, or None if unknown. `names` are
    the data's classes in the order of labels, as names or as class indices. With `subset`, the data
    may lack classes, as ImageNet-R does. Any other difference raises `ConfigError`.
    """
    indices = {name: index for index, name in enumerate(trained or ())}
    if subset and set(names) < indices.keys():
        return [indices[name] for name in names]
    if reason := difference(trained, outputs, names):
        raise ConfigError(f"{reason}: expected the same classes")
    if trained is None:
        return None
    if set(names) != indices.keys():
        indices = {name: int(name) for name in names}
    mapping = [indices[name] for name in names]
    return None if mapping == sorted(mapping) else mapping


def _are_indices(names: Sequence[str], trained: Sequence[str]) -> bool:
    """Return whether `names` are class indices as text, and the weights have other names."""
    indices = sorted(int(name) if name.isdecimal() else -1 for name in names)
    return indices == list(range(len(names))) and not all(name.isdecimal() for name in trained)
