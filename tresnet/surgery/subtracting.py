"""Convolutions of any model swapped for subtracted ones, and those baked into plain ones."""

from collections.abc import Callable
from typing import Literal

from torch import nn

from tresnet.errors import InputError
from tresnet.layers.subtracted_conv import SubtractedConv
from tresnet.layers.watched import check_model, refuse_watched, what_watches
from tresnet.ops.subtracted_conv import MODES, Mode

Which = Literal["smaller", "spatial", "all"]
_WHICH = ("smaller", "spatial", "all")


def replace_conv(
    model: nn.Module,
    *,
    mode: Mode = "composed",
    which: Which | Callable[[str, nn.Conv2d], bool] = "smaller",
) -> list[str]:
    """Swap suitable convolutions of `model` for freshly initialised `SubtractedConv`s, in place.

    Suitable is what a `SubtractedConv` can stand in for: square odd kernel, padding kernel // 2,
    equal strides, no dilation, groups or bias, an even number of output channels, nothing that
    watches or changes it. This is another
    network, not a rewrite of the same: train it.

    Of torchvision's and timm's ResNet50 (25.56 M parameters), 'smaller' swaps the sixteen 3x3
    convolutions and the sixteen 1x1 that do not widen, and leaves 15.87 M, the '16 M against 25 M'
    of the module's author. The 3x3 alone give 17.71 M. Every 1x1 that widens would grow: the L of 2
    C channels in a block's last convolution has as many weights (4 C^2) as all of what it replaces,
    before P is counted.

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
    chosen = _chooser(which)
    convs = _convs(model)
    unsuitable = {name: why for name, conv in convs.items() if (why := _misfit(conv))}
    names = [n for n, conv in convs.items() if n not in unsuitable and chosen(n, conv)]
    if not names:
        raise InputError(_nothing(model, len(convs), unsuitable))
    new: dict[nn.Conv2d, SubtractedConv] = {}  # a convolution that has two places stays one
    for name in names:
        conv = convs[name]
        if conv not in new:
            new[conv] = _counterpart(conv, mode)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new[conv])
    return names


def _convs(model: nn.Module) -> dict[str, nn.Conv2d]:
    """Return the convolutions under each of their names, those of a `SubtractedConv` left out."""
    named = list(model.named_modules(remove_duplicate=False))
    inside = [f"{name}." for name, module in named if isinstance(module, SubtractedConv)]
    return {
        name: module
        for name, module in named
        if name and isinstance(module, nn.Conv2d) and not name.startswith(tuple(inside))
    }


def _chooser(which: Which | Callable[[str, nn.Conv2d], bool]) -> Callable[[str, nn.Conv2d], bool]:
    if callable(which):
        return which
    if which == "smaller":
        return lambda _, conv: factor_parameters(conv) < conv.weight.numel()
    if which == "spatial":
        return lambda _, conv: conv.kernel_size[0] > 1
    if which == "all":
        return lambda *_: True
    raise InputError(f"expected which out of {', '.join(_WHICH)}, or a function, got {which!r}")


def factor_parameters(conv: nn.Conv2d) -> int:
    """Return the parameters of P, D and L that would stand in for a convolution."""
    half, taps = conv.out_channels // 2, conv.kernel_size[0] ** 2
    return conv.in_channels * half + half * taps + half * half * taps


def _misfit(conv: nn.Conv2d) -> str | None:
    """Return why a convolution has no counterpart, None if it has."""
    if conv.in_channels == 0:
        return "it is lazy and has never run"
    watches = what_watches(conv)
    if watches is not None:
        return f"it has {watches}"
    kernel = conv.kernel_size[0]
    named = {"same": (kernel // 2, kernel // 2), "valid": (0, 0)}
    border = (
        named.get(conv.padding, conv.padding) if isinstance(conv.padding, str) else conv.padding
    )
    reasons = {
        "its kernel is not square and odd": conv.kernel_size[1] != kernel or kernel % 2 == 0,
        "its padding is not kernel // 2 of zeros": border != (kernel // 2, kernel // 2)
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


def _nothing(model: nn.Module, count: int, unsuitable: dict[str, str]) -> str:
    what = type(model).__name__
    if isinstance(model, nn.Conv2d):
        return f"expected a model that holds convolutions, got a lone {what}: wrap it in a module"
    if not count:
        return f"expected convolutions to replace, but {what} has none"
    example = next(iter(unsuitable.items()), None)
    detail = f"; {example[0]}: {example[1]}" if example else ""
    return (
        f"expected convolutions to replace, but of the {count} of {what} {len(unsuitable)} have no "
        f"counterpart{detail}, and none of the others is chosen by `which`"
    )


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
    refuse_watched(
        {
            name or "the module": module
            for outer, conv in model.named_modules()
            if isinstance(conv, SubtractedConv)
            for name, module in conv.named_modules(prefix=outer)
        }
    )
    if isinstance(model, SubtractedConv):
        return model.to_conv()
    # not named_children, which names a shared child once only
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if isinstance(child, SubtractedConv)
    ]
    if not found:
        raise InputError(f"expected a SubtractedConv in {type(model).__name__}, found none")
    # a convolution that several parents share stays shared
    fused = {id(child): child.to_conv() for _, _, child in found}
    for parent, name, child in found:
        setattr(parent, name, fused[id(child)])
    return model
