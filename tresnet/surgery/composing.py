"""Linear convolutions after or beside one another as one, where that is exact.

A convolution reads the input, zero outside its borders, at stride * i + tap - padding. Kernels are
written out here, without dilation and groups: composing them is a transposed convolution of one
with the other, adding them needs zeros around the smaller, and `_to_module` leaves out what is
zero again. What there is once for rows and once for columns is an array of two.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tresnet.errors import InputError
from tresnet.layers.subtracted_conv import SubtractedConv
from tresnet.layers.watched import refuse_watched

Branch = nn.Conv2d | SubtractedConv | nn.Sequential | nn.Identity
_Value = Callable[["_Linear"], object]


def compose(*modules: Branch) -> nn.Conv2d:
    """Return the one convolution that does what the given ones do one after another.

    Stride, dilation, groups and bias may be any. Exact for every input size where none but the
    first pads; before one that does, there must be no bias and a padding of at least
    dilation * (kernel - 1), which a 1x1 convolution always has. It may cost more than its factors.

    Args:
        modules: in order: `nn.Conv2d`, `SubtractedConv`, `nn.Sequential` of such; not changed.

    Returns:
        A new `nn.Conv2d`, composed in float64, with the dtype and device of the first weight.

    Raises:
        InputError: a part is not a linear convolution, something watches it, or the composition is
            not exact; names it.
    """
    convs = [conv for chain in _chains(modules, "part") for conv in chain]
    return _to_module(reduce(_after, convs), modules)


def compose_sum(*branches: Branch) -> nn.Conv2d:
    """Return the one convolution that gives the sum of linear branches of one input.

    Exact if all have the same stride and output size (3x3 padded by 1 beside 1x1, say).

    Args:
        branches: convolutions, chains of them in `nn.Sequential`, or `nn.Identity` (the input).

    Raises:
        InputError: a branch is not linear or does not fit the others; names it.
    """
    convs = _parallel(branches)
    for conv in convs:
        _check_equal("only equal outputs add up", convs[0], conv, lambda c: len(c.weight))
    weight, bias = sum(c.weight for c in convs), sum(c.bias for c in convs)
    groups = math.gcd(*(c.groups for c in convs))
    return _to_module(replace(convs[0], weight=weight, bias=bias, groups=groups), branches)


def compose_cat(*branches: Branch) -> nn.Conv2d:
    """Return the one convolution that gives the concatenated outputs of linear branches.

    Arguments and errors are those of `compose_sum`. Groups are filled up with zeros.
    """
    convs = _parallel(branches)
    weight, bias = torch.cat([c.weight for c in convs]), torch.cat([c.bias for c in convs])
    return _to_module(replace(convs[0], weight=weight, bias=bias, groups=1), branches)


@dataclass(frozen=True)
class _Linear:
    """A convolution as a value: its kernel written out in float64, (out, in, rows, columns)."""

    name: str
    weight: Tensor
    bias: Tensor  # zeros for none
    stride: np.ndarray
    padding: np.ndarray
    grid: np.ndarray  # distances that divide those between all taps; 0 for a single tap
    groups: int  # blocks of channels known not to mix

    @property
    def extent(self) -> np.ndarray:  # from the first tap to the last
        return np.array(self.weight.shape[2:]) - 1


def _refuse(wrong: object, message: str) -> None:
    if wrong:
        raise InputError(message)


def _check_equal(what: str, first: _Linear, other: _Linear, value: _Value) -> None:
    a, b = str(value(first)), str(value(other))
    _refuse(a != b, f"{what}: {first.name} has {a}, {other.name} has {b}")


def _chains(modules: Sequence[nn.Module], kind: str) -> list[list[_Linear]]:
    """Return the convolutions of each module, in order, all on one device."""
    chains = [_chain(module, f"{kind} {index}") for index, module in enumerate(modules)]
    convs = [conv for chain in chains for conv in chain]
    _refuse(not convs, f"expected at least one {kind} with a convolution, got identities alone")
    for conv in convs:
        _check_equal("expected all on one device", convs[0], conv, lambda c: c.weight.device)
    return chains


def _chain(module: Any, name: str) -> list[_Linear]:
    """Return the convolutions of a module in order; none for an identity."""
    if isinstance(module, SubtractedConv):
        refuse_watched(dict(module.named_modules(prefix=name)))
        module = module.to_conv()
    elif isinstance(module, nn.Module):
        refuse_watched({name: module})
    if isinstance(module, nn.Identity):
        return []
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        # not named_children, which names a convolution that comes twice once only
        parts = module._modules.items()
        return [conv for key, child in parts for conv in _chain(child, f"{name}.{key}")]
    if type(module) is not nn.Conv2d or module.weight.is_complex():
        raise InputError(
            "expected real linear convolutions (nn.Conv2d, SubtractedConv or nn.Sequential of "
            f"them), but {name} is {type(module).__name__}"
        )
    size, channels = module.kernel_size, f"{module.in_channels} to {module.out_channels} channels"
    return [_from_module(module, f"{name} ({size[0]}x{size[1]} convolution, {channels})")]


def _from_module(conv: nn.Conv2d, name: str) -> _Linear:
    dilation, kernel = np.array(conv.dilation), np.array(conv.kernel_size)
    twice = 2 * np.array(conv.padding) if not isinstance(conv.padding, str) else np.zeros(2, int)
    if conv.padding == "same":
        twice = dilation * (kernel - 1)
    _refuse(
        any(twice % 2) or (conv.padding_mode != "zeros" and any(twice)),
        f"{name} has padding={conv.padding!r} and padding_mode={conv.padding_mode!r}: expected as "
        "many zeros on one side as on the other",
    )
    weight = conv.weight.detach().double()
    one = torch.eye(conv.out_channels).to(weight)[..., None, None]
    written_out = F.conv_transpose2d(one, weight, dilation=conv.dilation, groups=conv.groups)
    return _Linear(
        name,
        written_out,
        weight.new_zeros(conv.out_channels) if conv.bias is None else conv.bias.detach().double(),
        np.array(conv.stride),
        twice // 2,
        np.where(kernel > 1, dilation, 0),
        conv.groups,
    )


def _to_module(conv: _Linear, sources: Sequence[nn.Module]) -> nn.Conv2d:
    """Make a module with the dtype, device and trainability of the first parameter of `sources`."""
    like = next(parameter for module in sources for parameter in module.parameters())
    grid = np.where(conv.grid, conv.grid, 1)
    blocks = conv.weight[..., :: grid[0], :: grid[1]].chunk(conv.groups)
    weight = torch.cat([block.chunk(conv.groups, 1)[group] for group, block in enumerate(blocks)])
    has_bias = any(getattr(m, "bias", None) is not None for s in sources for m in s.modules())
    module = nn.Conv2d(
        conv.weight.shape[1],
        len(weight),
        (weight.shape[2], weight.shape[3]),
        *(tuple(setting.tolist()) for setting in (conv.stride, conv.padding, grid)),
        groups=conv.groups,
        bias=has_bias,
        device=like.device,
        dtype=like.dtype,
    )
    with torch.no_grad():
        module.weight.copy_(weight)
        if module.bias is not None:
            module.bias.copy_(conv.bias)
    return module.requires_grad_(like.requires_grad)


def _after(first: _Linear, second: _Linear) -> _Linear:
    """Return `second` applied to the output of `first`.

    Its tap v reads output position s2 i + v - p2 of the first, so input position
    s1 s2 i + s1 v + u - (s1 p2 + p1).
    """
    _check_meeting(first, second)
    return _Linear(
        f"{first.name} and {second.name}",
        F.conv_transpose2d(second.weight, first.weight, stride=first.stride.tolist()),
        second.bias + second.weight.sum((2, 3)) @ first.bias,
        first.stride * second.stride,
        first.padding + first.stride * second.padding,
        np.gcd(first.grid, first.stride * second.grid),
        math.gcd(first.groups, second.groups),
    )


def _check_meeting(first: _Linear, second: _Linear) -> None:
    """Check that channels meet, and that what `second` reads beyond its input is zero.

    Beyond its last output `first` reads from `padding - extent` pixels past the border on.
    """
    gives, takes = len(first.weight), second.weight.shape[1]
    _refuse(gives != takes, f"{first.name} gives {gives} channels, but {second.name} takes {takes}")
    if not any(second.padding):
        return
    both = f"{second.name} pads the output of {first.name} with zeros"
    _refuse(
        first.bias.is_meta or first.bias.any(),
        f"{both}, where {first.name} on its own would give its bias: not exact at the border. "
        "Remove that bias, or the padding of the second",
    )
    _refuse(
        any((second.padding > 0) & (first.padding < first.extent)),
        f"{both}, where {first.name} on its own would still see pixels: expected its padding to be "
        f"at least dilation * (kernel - 1) = {first.extent}, got {first.padding}",
    )


def _parallel(branches: Sequence[nn.Module]) -> list[_Linear]:
    """Return the branches with kernels of one size, padding and grid."""
    chains = _chains(branches, "branch")
    known = next(chain[0] for chain in chains if chain)
    channels, zeros = known.weight.shape[1], np.zeros(2, int)
    one = torch.eye(channels).to(known.weight)[..., None, None]
    identity = _Linear("", one, one.new_zeros(channels), zeros + 1, zeros, zeros, channels)
    convs = [
        reduce(_after, chain) if chain else replace(identity, name=f"branch {index}")
        for index, chain in enumerate(chains)
    ]
    for conv in convs:
        _check_equal(
            "the branches differ in channels, stride, or 2 * padding - dilation * (kernel - 1)",
            convs[0],
            conv,
            lambda c: (c.weight.shape[1], c.stride.tolist(), (2 * c.padding - c.extent).tolist()),
        )
    padding = np.max([conv.padding for conv in convs], axis=0)
    more = [padding - conv.padding for conv in convs]
    extent = convs[0].extent + 2 * more[0]  # of the whole
    grid = np.gcd.reduce([extent, *more, *(conv.grid for conv in convs)])
    return [
        replace(conv, weight=F.pad(conv.weight, (x, x, y, y)), padding=padding, grid=grid)
        for conv, (y, x) in zip(convs, more, strict=True)
    ]
