"""Parts of a model by name, of which a training step may train some and freeze the others."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from tresnet.errors import ConfigError, listed


def parts_of(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the parameters of each part: stem, layer1, layer2, ... and head.

    The parts are timm's coarse groups of layers. `ConfigError`: the model has no `group_matcher`.
    """
    from timm.models import group_parameters

    source: Any = model
    if not hasattr(model, "group_matcher"):
        raise ConfigError(
            "--train-only: expected a model that names its parts by timm's group_matcher, got"
            f" {type(model).__name__}: set requires_grad of its parameters in place of the option"
        )
    groups = [*group_parameters(model, source.group_matcher(coarse=True)).values()]
    heads = source.get_classifier()  # some models have two, of which one is distilled
    classifier = nn.ModuleList(heads if isinstance(heads, tuple) else [heads])
    tensors = {id(parameter) for parameter in classifier.parameters()}
    has_head = any(id(model.get_parameter(name)) in tensors for name in groups[-1])
    layers = [f"layer{index}" for index in range(1, len(groups) - has_head)]
    return dict(zip(["stem", *layers, *["head"] * has_head], groups, strict=True))


def freeze(model: nn.Module, trained: Sequence[str]) -> None:
    """Let parameters of other parts than `trained` require no gradient, or raise `ConfigError`."""
    parts = parts_of(model)
    for name in trained:
        if name not in parts:
            raise ConfigError(
                f"--train-only: expected parts of the model ({listed(parts)}), got {name!r:.80}"
            )
    kept = {name for part in trained for name in parts[part]}
    for name, parameter in model.named_parameters():
        if name not in kept:
            parameter.requires_grad_(False)


def frozen_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules with parameters of which none requires a gradient."""
    found = []
    for module in model.modules():
        needs_grad = [parameter.requires_grad for parameter in module.parameters()]
        if needs_grad and not any(needs_grad):
            found.append(module)
    return found


def describe_trained(model: nn.Module) -> str:
    """Return a text such as '5,130 of 11,173,962 parameters train, the others are frozen'."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    trained, total = sum(n for n, trains in sizes if trains), sum(n for n, _ in sizes)
    if trained == total:
        return f"all {total:,} parameters train"
    return f"{trained:,} of {total:,} parameters train, the others are frozen"
