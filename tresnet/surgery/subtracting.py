"""Convolutions of any model swapped for subtracted ones, and those baked into plain ones."""

from collections.abc import Callable
from typing import Literal, TypeVar

from torch import nn

from tresnet.errors import InputError
from tresnet.layers.subtracted_conv import SubtractedConv
from tresnet.layers.watched import check_model, refuse_watched, what_watches
from tresnet.ops.subtracted_conv import MODES, Mode

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Which = Literal["smaller", "spatial", "all"]
_WHICH: dict[str, Callable[[str, nn.Conv2d], bool]] = {
    "smaller": lambda _, conv: factor_parameters(conv) < conv.weight.numel(),
    "spatial": lambda _, conv: conv.kernel_size[0] > 1,
    "all": lambda *_: True,
}


def replace_conv(
    model: nn.Module,
    *,
    mode: Mode = "composed",
    which: Which | Callable[[str, nn.Conv2d], bool] = "smaller",
) -> list[str]:
    """Replace suitable convolutions of `model` by new, random `SubtractedConv` layers, in place.

    Suitable is what a `SubtractedConv` can stand in for: square odd kernel, padding kernel // 2,
    equal strides, no dilation, groups or bias, an even number of output channels, nothing that
    watches or changes it. This is another network, not a rewrite of the same: train it.

    Of torchvision's and timm's ResNet50 (25.56 M parameters), 'smaller' swaps the sixteen 3x3
    convolutions and the sixteen 1x1 that do not widen, and leaves 15.87 M. Every 1x1 that widens
    would grow: the L of 2 C channels in a block's last convolution has as many weights (4 C^2) as
    all of what it replaces, before P is counted.

    Args:
        model: changed in place.
        mode: of the new modules.
        which: 'smaller' swaps where that saves parameters; 'spatial' where the kernel is larger
            than 1x1; 'all' wherever possible; or a function of name and convolution.

    Returns:
        The names of the swapped convolutions.

    Raises:
        InputError: an unknown mode or choice, or nothing that is both suitable and chosen.
    """
    if mode not in MODES:
        raise InputError(f"expected mode out of {', '.join(MODES)}, got {mode!r}")
    check_model(model)
    if any(getattr(module, "unpadded_shapes", None) for module in model.modules()):
        raise InputError(
            "expected a model without padded channels, got a padded one: replace its convolutions "
            "first, or call tresnet.surgery.unpad_channels"
        )
    chosen = which if callable(which) else _WHICH.get(which)
    if chosen is None:
        raise InputError(f"expected which out of {', '.join(_WHICH)}, or a function, got {which!r}")
    found = _places(model, nn.Conv2d)
    inside = tuple(f"{name}." for name in _places(model, SubtractedConv))
    convs = {name: conv for name, conv in found.items() if not name.startswith(inside)}
    unsuitable = {name: why for name, conv in convs.items() if (why := _misfit(conv))}
    names = [n for n, conv in convs.items() if n not in unsuitable and chosen(n, conv)]
    if not names:
        example = next((f"; {name}: {why}" for name, why in unsuitable.items()), "")
        raise InputError(
            f"expected convolutions inside the model to replace, but of the {len(convs)} in "
            f"{type(model).__name__} {len(unsuitable)} have no counterpart{example}, and none of "
            "the others is chosen by `which`"
        )
    _put(model, {name: convs[name] for name in names}, lambda conv: _counterpart(conv, mode))
    return names


def fuse(model: nn.Module) -> nn.Module:
    """Replace each `SubtractedConv` of `model` by the `nn.Conv2d` it amounts to, in place.

    Outputs stay the same, to rounding; the factors are gone, so train before.

    Args:
        model: any module, or a `SubtractedConv` itself.

    Returns:
        The model, or, where it is itself a `SubtractedConv`, the convolution.

    Raises:
        InputError: there is nothing to fuse, or something watches or changes it.
    """
    check_model(model)
    if isinstance(model, SubtractedConv):
        refuse_watched(dict(model.named_modules(prefix="the module")))
        return model.to_conv()
    found = _places(model, SubtractedConv)
    if not found:
        raise InputError(f"expected a SubtractedConv in {type(model).__name__}, found none")
    refuse_watched(
        {name: part for prefix, m in found.items() for name, part in m.named_modules(prefix=prefix)}
    )
    _put(model, found, SubtractedConv.to_conv)
    return model


def factor_parameters(conv: nn.Conv2d) -> int:
    """Return the parameters of P, D and L that would stand in for a convolution."""
    half, taps = conv.out_channels // 2, conv.kernel_size[0] ** 2
    return conv.in_channels * half + half * taps + half * half * taps


def _places(model: nn.Module, kind: type[ModuleT]) -> dict[str, ModuleT]:
    """The modules of a kind inside `model`, under each of their names."""
    named = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in named if name and isinstance(module, kind)}


def _put(
    model: nn.Module, places: dict[str, ModuleT], make: Callable[[ModuleT], nn.Module]
) -> None:
    """Replace modules; one that has two places stays one."""
    new = {module: make(module) for module in dict.fromkeys(places.values())}
    for name, module in places.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new[module])


def _misfit(conv: nn.Conv2d) -> str | None:
    """Return why a convolution has no counterpart, None if it has."""
    if conv.in_channels == 0:
        return "it is lazy and has never run"
    watches = what_watches(conv)
    if watches is not None:
        return f"it has {watches}"
    kernel = conv.kernel_size[0]
    half = (kernel // 2, kernel // 2)
    border = {"same": half, "valid": (0, 0)}.get(str(conv.padding), conv.padding)
    reasons = {
        "its kernel is not square and odd": conv.kernel_size[1] != kernel or kernel % 2 == 0,
        "its padding is not kernel // 2 of zeros": border != half
        or (conv.padding_mode != "zeros" and kernel > 1),
        "its strides differ": conv.stride[0] != conv.stride[1],
        "it is dilated": tuple(conv.dilation) != (1, 1) and kernel > 1,
        "it has groups": conv.groups != 1,
        "it has a bias": conv.bias is not None,
        "its number of output channels is odd": conv.out_channels % 2 == 1,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _counterpart(conv: nn.Conv2d, mode: Mode) -> SubtractedConv:
    new = SubtractedConv(
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size[0],
        conv.stride[0],
        mode=mode,
        device=conv.weight.device,
        dtype=conv.weight.dtype,
    )
    return new.train(conv.training).requires_grad_(conv.weight.requires_grad)
