"""The algebra of linear convolutions: what one does after, beside or on top of another.

A convolution reads the input, zero outside its borders, at stride * i + dilation * tap - padding.
Everything here follows from comparing these positions and the sizes they lead to.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor, nn

from tresnet.errors import InputError

Pair = tuple[int, int]
_PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


@dataclass(frozen=True)
class LinearConv:
    """A two-dimensional convolution as a value.

    Attributes:
        name: what error messages call it.
        weight: (out, in / groups, kh, kw), float64.
        bias: (out,), float64, or None.
        stride: rows, columns.
        padding: rows, columns, on both sides alike.
        dilation: rows, columns.
        groups: blocks of channels that do not mix.
        padding_mode: 'zeros', or what else `nn.Conv2d` knows.
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    padding_mode: str = "zeros"

    @property
    def in_channels(self) -> int:
        """Channels of the input."""
        return self.weight.shape[1] * self.groups

    @property
    def out_channels(self) -> int:
        """Channels of the output."""
        return self.weight.shape[0]

    @property
    def extent(self) -> Pair:
        """Distance from the first tap to the last, in pixels."""
        return (
            self.dilation[0] * (self.weight.shape[2] - 1),
            self.dilation[1] * (self.weight.shape[3] - 1),
        )

    @property
    def growth(self) -> Pair:
        """Pixels by which the output is larger than the input at stride 1."""
        return (
            2 * self.padding[0] - self.extent[0],
            2 * self.padding[1] - self.extent[1],
        )

    def blocks(self, groups: int) -> Tensor:
        """Return the weight as (groups, out / groups, in / groups, kh, kw); `groups` divides ours."""
        out, per_group, *kernel = self.weight.shape
        inner = self.groups // groups
        tiles = self.weight.reshape(groups, inner, out // self.groups, per_group, *kernel)
        dense = tiles.new_zeros(groups, inner, out // self.groups, inner, per_group, *kernel)
        for index in range(inner):
            dense[:, index, :, index] = tiles[:, index]
        return dense.reshape(groups, out // groups, inner * per_group, *kernel)


def from_module(conv: nn.Conv2d, name: str) -> LinearConv:
    """Read a module.

    Raises:
        InputError: padding='same' of an even kernel, which is not the same on both sides, or complex
            weights.
    """
    if conv.weight.is_complex():
        raise InputError(f"{name} has complex weights: expected real ones, got {conv.weight.dtype}")
    kernel, dilation = cast(Pair, conv.kernel_size), cast(Pair, conv.dilation)
    return LinearConv(
        name,
        conv.weight.detach().double(),
        None if conv.bias is None else conv.bias.detach().double(),
        cast(Pair, conv.stride),
        _padding(conv, kernel, dilation, name),
        dilation,
        conv.groups,
        conv.padding_mode,
    )


def _padding(conv: nn.Conv2d, kernel: Pair, dilation: Pair, name: str) -> Pair:
    if conv.padding == "valid":
        return (0, 0)
    if conv.padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        if any(size % 2 for size in total):
            raise InputError(
                f"{name} pads one side more than the other (padding='same', kernel {kernel}), "
                "which one convolution cannot: give it a padding of its own"
            )
        return (total[0] // 2, total[1] // 2)
    return cast(Pair, conv.padding)


def identity(channels: int, name: str) -> LinearConv:
    """Return the 1x1 convolution that changes nothing."""
    return LinearConv(
        name, torch.ones(channels, 1, 1, 1, dtype=torch.float64), None, groups=channels
    )


def to_module(conv: LinearConv, like: Tensor) -> nn.Conv2d:
    """Make a module with the dtype, device and trainability of `like`."""
    module = nn.Conv2d(
        conv.in_channels,
        conv.out_channels,
        (conv.weight.shape[2], conv.weight.shape[3]),
        conv.stride,
        conv.padding,
        conv.dilation,
        conv.groups,
        conv.bias is not None,
        cast(_PaddingMode, conv.padding_mode),
        device=like.device,
        dtype=like.dtype,
    )
    with torch.no_grad():
        module.weight.copy_(conv.weight)
        if module.bias is not None and conv.bias is not None:
            module.bias.copy_(conv.bias)
    return module.requires_grad_(like.requires_grad)


def after(first: LinearConv, second: LinearConv) -> LinearConv:
    """Return `second` applied to the output of `first`, as one convolution.

    Tap v of the second reads output position s2 i + d2 v - p2 of the first, so input position
    s1 s2 i + s1 d2 v + d1 u - (s1 p2 + p1): the products of strides, the taps s1 d2 v + d1 u, whose
    common divisor is the dilation, and that padding.

    Raises:
        InputError: channels do not meet, or the border would come out otherwise.
    """
    _check_meeting(first, second)
    pads = any(second.padding)
    if pads:
        _check_border(first, second)
    steps = (
        (first.stride[0] * second.dilation[0], first.dilation[0]),
        (first.stride[1] * second.dilation[1], first.dilation[1]),
    )
    kernels = [(second.weight.shape[i], first.weight.shape[i]) for i in (2, 3)]
    dilation = [_common(step, kernel) for step, kernel in zip(steps, kernels, strict=True)]
    groups = math.gcd(first.groups, second.groups)
    return LinearConv(
        f"{first.name} and {second.name}",
        _product(first.blocks(groups), second.blocks(groups), steps, dilation),
        _carried_bias(first, second),
        (first.stride[0] * second.stride[0], first.stride[1] * second.stride[1]),
        (
            first.padding[0] + first.stride[0] * second.padding[0],
            first.padding[1] + first.stride[1] * second.padding[1],
        ),
        (dilation[0], dilation[1]),
        groups,
        "zeros" if pads else first.padding_mode,
    )


def _check_device(first: LinearConv, second: LinearConv) -> None:
    if first.weight.device != second.weight.device:
        raise InputError(
            f"{first.name} is on {first.weight.device}, {second.name} on {second.weight.device}: "
            "expected all on one device"
        )


def _check_meeting(first: LinearConv, second: LinearConv) -> None:
    _check_device(first, second)
    if first.out_channels != second.in_channels:
        raise InputError(
            f"{first.name} gives {first.out_channels} channels, but {second.name} takes "
            f"{second.in_channels}"
        )


def _check_border(first: LinearConv, second: LinearConv) -> None:
    """Check that what `second` reads beyond its input is zero in the composition too.

    Beyond its last output `first` would read at least `padding - extent` pixels past the border; it
    reads nothing but zeros for every input size only if that is not negative.
    """
    both = f"{second.name} pads the output of {first.name} with zeros"
    for conv in (first, second):
        if conv.padding_mode != "zeros" and any(conv.padding):
            raise InputError(
                f"{both}, and {conv.name} has padding_mode={conv.padding_mode!r}: only zeros around "
                "both compose exactly"
            )
    if first.bias is not None and (first.bias.is_meta or bool(first.bias.any())):
        raise InputError(
            f"{both}, where {first.name} on its own would give its bias: not exact at the border. "
            "Remove that bias, or the padding of the second"
        )
    for axis, side in enumerate(("rows", "columns")):
        if second.padding[axis] and first.padding[axis] < first.extent[axis]:
            raise InputError(
                f"{both}, where {first.name} on its own would still see pixels: expected its "
                f"padding in {side} to be at least dilation * (kernel - 1) = "
                f"{first.extent[axis]}, got {first.padding[axis]}. Not exact at the border; pad "
                "the first convolution instead, or not at all"
            )


def _common(step: Pair, kernel: Pair) -> int:
    """Return the largest dilation on whose grid all taps lie."""
    return math.gcd(*(size for size, taps in zip(step, kernel, strict=True) if taps > 1)) or 1


def _product(
    first: Tensor, second: Tensor, steps: tuple[Pair, Pair], dilation: Sequence[int]
) -> Tensor:
    """Return the weight (out, in / groups, KH, KW) from weights in blocks (g, out, in, kh, kw)."""
    groups, out = second.shape[:2]
    sizes = []
    for axis, (outer, inner) in enumerate(steps):
        reach = outer * (second.shape[axis + 3] - 1) + inner * (first.shape[axis + 3] - 1)
        sizes.append(reach // dilation[axis] + 1)
    weight = first.new_zeros(groups, out, first.shape[2], *sizes)
    for row in range(second.shape[3]):
        for column in range(second.shape[4]):
            part = torch.einsum("gom,gmiuv->goiuv", second[..., row, column], first)
            rows = _taps(row, first.shape[3], steps[0], dilation[0])
            columns = _taps(column, first.shape[4], steps[1], dilation[1])
            weight[..., rows, columns] += part
    return weight.flatten(0, 1)


def _taps(tap: int, count: int, step: Pair, dilation: int) -> slice:
    """Return where the inner taps land for one outer tap."""
    begin, stride = step[0] * tap // dilation, max(step[1] // dilation, 1)
    return slice(begin, begin + (count - 1) * stride + 1, stride)


def _carried_bias(first: LinearConv, second: LinearConv) -> Tensor | None:
    if first.bias is None:
        return second.bias
    groups = second.groups
    summed = second.weight.sum((2, 3)).unflatten(0, (groups, -1))
    carried = torch.einsum("gom,gm->go", summed, first.bias.unflatten(0, (groups, -1))).flatten()
    return carried if second.bias is None else carried + second.bias


def aligned(convs: Sequence[LinearConv]) -> list[LinearConv]:
    """Return convolutions of one input on one kernel grid: equal size, padding and dilation.

    Raises:
        InputError: they take other channels or strides, their outputs differ in size, or they are
            on different devices.
    """
    first = convs[0]
    for conv in convs[1:]:
        _check_device(first, conv)
        for what in ("in_channels", "stride", "growth"):
            mine, other = getattr(first, what), getattr(conv, what)
            if mine != other:
                raise InputError(f"{_MISFITS[what]}: {first.name} {mine}, {conv.name} {other}")
    for conv in convs:
        if conv.padding_mode != "zeros" and any(conv.padding):
            raise InputError(
                f"{conv.name} has padding_mode={conv.padding_mode!r}: expected zeros around every "
                "branch"
            )
    padding = (max(c.padding[0] for c in convs), max(c.padding[1] for c in convs))
    return [_on_grid(conv, padding, _grid(convs, padding)) for conv in convs]


_MISFITS = {
    "in_channels": "the branches take different numbers of channels",
    "stride": "the branches have different strides, so their outputs differ in size",
    "growth": "the branches' outputs differ in size; 2 * padding - dilation * (kernel - 1) is",
}


def _grid(convs: Sequence[LinearConv], padding: Pair) -> Pair:
    """Return the largest dilation on whose grid the taps of all the convolutions lie."""
    grid = []
    for axis in (0, 1):
        steps = [padding[axis] - conv.padding[axis] for conv in convs]
        steps += [conv.dilation[axis] for conv in convs if conv.weight.shape[axis + 2] > 1]
        # the extent of the whole, twice the padding less the growth, must lie on it too
        steps.append(2 * padding[axis] - convs[0].growth[axis])
        grid.append(math.gcd(*steps) or 1)
    return (grid[0], grid[1])


def _on_grid(conv: LinearConv, padding: Pair, grid: Pair) -> LinearConv:
    out, per_group, *kernel = conv.weight.shape
    sizes = [(2 * padding[axis] - conv.growth[axis]) // grid[axis] + 1 for axis in (0, 1)]
    weight = conv.weight.new_zeros(out, per_group, *sizes)
    slices = []
    for axis in (0, 1):
        begin = (padding[axis] - conv.padding[axis]) // grid[axis]
        step = max(conv.dilation[axis] // grid[axis], 1)
        slices.append(slice(begin, begin + (kernel[axis] - 1) * step + 1, step))
    weight[..., slices[0], slices[1]] = conv.weight
    return replace(conv, weight=weight, padding=padding, dilation=grid)


def added(convs: Sequence[LinearConv], coefficients: Sequence[float]) -> LinearConv:
    """Return the sum of branches, each times its coefficient, as one convolution.

    Raises:
        InputError: see `aligned`; or the branches give different numbers of channels.
    """
    for conv in convs[1:]:
        if conv.out_channels != convs[0].out_channels:
            raise InputError(
                f"only equal outputs add up: {convs[0].name} gives {convs[0].out_channels} "
                f"channels, {conv.name} {conv.out_channels}"
            )
    parts = aligned(convs)
    groups = math.gcd(*(conv.groups for conv in parts))
    weights = [c * conv.blocks(groups) for c, conv in zip(coefficients, parts, strict=True)]
    biases = [
        c * conv.bias for c, conv in zip(coefficients, parts, strict=True) if conv.bias is not None
    ]
    return replace(
        parts[0],
        name=" + ".join(conv.name for conv in convs),
        weight=torch.stack(weights).sum(0).flatten(0, 1),
        bias=torch.stack(biases).sum(0) if biases else None,
        groups=groups,
        padding_mode="zeros",
    )


def concatenated(convs: Sequence[LinearConv]) -> LinearConv:
    """Return branches whose outputs are concatenated, as one convolution.

    Raises:
        InputError: see `aligned`.
    """
    parts = aligned(convs)
    biased = any(conv.bias is not None for conv in parts)
    biases = [
        conv.weight.new_zeros(conv.out_channels) if conv.bias is None else conv.bias
        for conv in parts
    ]
    return replace(
        parts[0],
        name=", ".join(conv.name for conv in convs),
        weight=torch.cat([conv.blocks(1)[0] for conv in parts]),
        bias=torch.cat(biases) if biased else None,
        groups=1,
        padding_mode="zeros",
    )
