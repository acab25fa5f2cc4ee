"""Models by name: ours (`tresnet_m`), timm's (`timm:resnet50`), torchvision's."""

import torch
from torch import nn

from tresnet.errors import InputError
from tresnet.models.zoo import build, find_variant, nearest

SOURCES = ("tresnet", "timm", "torchvision")
_TORCHVISION_INPUT_SIZE = 224


def split_name(name: str) -> tuple[str, str]:
    """`timm:resnet50` to `('timm', 'resnet50')`; a name without a source is ours.

    Raises:
        InputError: the source is unknown.
    """
    source, colon, model = name.partition(":")
    if not colon:
        return "tresnet", name
    if source not in SOURCES:
        raise InputError(
            f"expected MODEL, timm:MODEL or torchvision:MODEL, got {name!r}: no source {source!r}"
        )
    return source, model


def check_name(name: str) -> None:
    """Raise `InputError` with the nearest name if no model is called `name`."""
    source, model = split_name(name)
    if source == "tresnet":
        find_variant(model)
        return
    known = _known_models(source)
    if model not in known:
        raise InputError(
            f"expected a model of {source}, got {model!r}{nearest(model, known)}"
            f" (see {source}'s list_models)"
        )


def build_named(name: str, norm: str | None = None, device: str | None = None) -> nn.Module:
    """A randomly initialised model with its own default head.

    Args:
        name: ours, or `timm:NAME`, or `torchvision:NAME`.
        norm: `abn`, `batchnorm` or `inplace_abn` for ours; None takes `abn`. Peers have no choice.
        device: where to build it; None means the CPU, `meta` allocates nothing.

    Raises:
        InputError: unknown name, or a norm for a model that is not ours.
        MissingDependencyError: `norm='inplace_abn'` without that package.
    """
    check_name(name)
    source, model = split_name(name)
    if source == "tresnet":
        return build(model, norm=norm or "abn", device=device)
    if norm is not None:
        raise InputError(f"expected no norm for {name}, got {norm!r}: only our models have one")
    with torch.device(device or "cpu"):
        if source == "timm":
            import timm

            return timm.create_model(model)
        import torchvision

        return torchvision.models.get_model(model, weights=None)


def default_input_size(model: nn.Module) -> int:
    """Side of the square input a model is made for: its `pretrained_cfg`'s, else 224."""
    config = getattr(model, "pretrained_cfg", None)
    if config is None:
        return _TORCHVISION_INPUT_SIZE
    return int(config["input_size"][-1])


def _known_models(source: str) -> list[str]:
    if source == "timm":
        import timm

        return timm.list_models()
    import torchvision

    return torchvision.models.list_models(module=torchvision.models)
