"""Linear convolutions after or beside one another as one, where that is exact.

A convolution reads the input, zero outside its borders, at stride * i + tap - padding. Kernels are
written out here, without dilation and groups, so that composing them is a convolution of one with
the other and adding them needs zeros around the smaller; `_to_module` leaves out what is zero
again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tresnet.errors import InputError
from tresnet.layers.subtracted_conv import SubtractedConv
from tresnet.layers.watched import refuse_watched

Pair = tuple[int, int]
Branch = nn.Conv2d | SubtractedConv | nn.Sequential | nn.Identity


def compose(first: nn.Module, second: nn.Module, *more: nn.Module) -> nn.Conv2d:
    """Return the one convolution that does what the given ones do one after another.

    Stride, dilation, groups and bias may be any. Exact for every input size if the second does not
    pad; if it does, the first must have no bias and a padding of at least its
    dilation * (kernel - 1), which a 1x1 convolution always has. It may cost more than its factors.

    Args:
        first: `nn.Conv2d`, `SubtractedConv`, or `nn.Sequential` of such; not changed.
        second: what follows.
        more: what follows that.

    Returns:
        A new `nn.Conv2d`, composed in float64, with the dtype and device of the first weight.

    Raises:
        InputError: a part is not a linear convolution, something watches it, or the composition is
            not exact; names it.
    """
    modules = (first, second, *more)
    convs = [conv for i, module in enumerate(modules) for conv in _chain(module, f"part {i}")]
    _refuse(not convs, "expected at least one convolution to compose, got identities alone")
    return _to_module(_successive(convs), modules)


def compose_sum(*branches: Branch, coefficients: Sequence[float] | None = None) -> nn.Conv2d:
    """Return the one convolution that gives the sum of linear branches of one input.

    Exact if all have the same stride and output size (3x3 padded by 1 beside 1x1, say).

    Args:
        branches: convolutions, chains of them in `nn.Sequential`, or `nn.Identity` (the input).
        coefficients: factor of each branch; None adds them up. (1, -1) is the difference.

    Returns:
        A new `nn.Conv2d`; see `compose`.

    Raises:
        InputError: a branch is not linear or does not fit the others; names it.
    """
    factors = [1.0] * len(branches) if coefficients is None else list(coefficients)
    _refuse(
        len(factors) != len(branches),
        f"expected one coefficient for each of {len(branches)} branches, got {len(factors)}",
    )
    convs = _parallel(branches)
    for conv in convs:
        _refuse(
            conv.out_channels != convs[0].out_channels,
            f"only equal outputs add up: {convs[0].name} gives {convs[0].out_channels} channels, "
            f"{conv.name} {conv.out_channels}",
        )
    biases = [f * c.bias for f, c in zip(factors, convs, strict=True) if c.bias is not None]
    whole = replace(
        convs[0],
        weight=torch.stack([f * c.weight for f, c in zip(factors, convs, strict=True)]).sum(0),
        bias=torch.stack(biases).sum(0) if biases else None,
        groups=math.gcd(*(conv.groups for conv in convs)),
    )
    return _to_module(whole, branches)


def compose_cat(*branches: Branch) -> nn.Conv2d:
    """Return the one convolution that gives the concatenated outputs of linear branches.

    Args:
        branches: see `compose_sum`. Groups are filled up with zeros: the result has one group.

    Returns:
        A new `nn.Conv2d`; see `compose`.

    Raises:
        InputError: a branch is not linear or does not fit the others; names it.
    """
    convs = _parallel(branches)
    biases = [c.weight.new_zeros(c.out_channels) if c.bias is None else c.bias for c in convs]
    whole = replace(
        convs[0],
        weight=torch.cat([conv.weight for conv in convs]),
        bias=torch.cat(biases) if any(conv.bias is not None for conv in convs) else None,
        groups=1,
    )
    return _to_module(whole, branches)


@dataclass(frozen=True)
class _Linear:
    """A convolution as a value: its kernel written out in float64, (out, in, rows, columns)."""

    name: str
    weight: Tensor
    bias: Tensor | None
    stride: Pair
    padding: Pair
    grid: Pair  # distances that divide those between all taps
    groups: int  # blocks of channels known not to mix
    padding_mode: str

    @property
    def out_channels(self) -> int:
        return self.weight.shape[0]

    @property
    def extent(self) -> Pair:
        """Distance from the first tap to the last."""
        return self.weight.shape[2] - 1, self.weight.shape[3] - 1

    @property
    def growth(self) -> Pair:
        """Pixels by which the output is larger than the input at stride 1."""
        return _pair(lambda axis: 2 * self.padding[axis] - self.extent[axis])


def _pair(value: Any) -> Pair:
    """A value of each axis."""
    return value(0), value(1)


def _chain(module: Any, name: str) -> list[_Linear]:
    """Return the convolutions of a part in order; none for an identity."""
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
    _refuse(
        type(module) is not nn.Conv2d,
        "expected linear convolutions (nn.Conv2d, SubtractedConv or nn.Sequential of them), but "
        f"{name} is {type(module).__name__}",
    )
    conv = cast(nn.Conv2d, module)
    size = "x".join(map(str, conv.kernel_size))
    channels = f"{conv.in_channels} to {conv.out_channels} channels"
    return [_from_module(conv, f"{name} ({size} convolution, {channels})")]


def _from_module(conv: nn.Conv2d, name: str) -> _Linear:
    dtype = conv.weight.dtype
    _refuse(dtype.is_complex, f"{name} has complex weights: expected real ones, got {dtype}")
    kernel, dilation = cast(Pair, conv.kernel_size), cast(Pair, conv.dilation)
    blocks = conv.weight.detach().double().unflatten(0, (conv.groups, -1))
    weight = blocks.new_zeros(conv.groups, blocks.shape[1], conv.groups, *blocks.shape[2:])
    for group in range(conv.groups):
        weight[group, :, group] = blocks[group]
    weight = _spread(weight.flatten(0, 1).flatten(1, 2), dilation)
    return _Linear(
        name,
        weight,
        None if conv.bias is None else conv.bias.detach().double(),
        cast(Pair, conv.stride),
        _padding(conv, name),
        _pair(lambda axis: dilation[axis] if kernel[axis] > 1 else 0),
        conv.groups,
        conv.padding_mode,
    )


def _spread(weight: Tensor, step: Pair) -> Tensor:
    """Put zeros between the taps of a kernel, which are then `step` pixels apart."""
    rows, columns = (step[axis] * (weight.shape[axis + 2] - 1) + 1 for axis in (0, 1))
    spread = weight.new_zeros(*weight.shape[:2], rows, columns)
    spread[..., :: step[0], :: step[1]] = weight
    return spread


def _padding(conv: nn.Conv2d, name: str) -> Pair:
    if not isinstance(conv.padding, str):
        return cast(Pair, conv.padding)
    if conv.padding == "valid":
        return (0, 0)
    total = _pair(lambda axis: conv.dilation[axis] * (conv.kernel_size[axis] - 1))
    _refuse(
        total[0] % 2 or total[1] % 2,
        f"{name} pads one side more than the other (padding='same', kernel {conv.kernel_size}), "
        "which one convolution cannot: give it a padding of its own",
    )
    return total[0] // 2, total[1] // 2


def _to_module(conv: _Linear, sources: Sequence[nn.Module]) -> nn.Conv2d:
    """Make a module with the dtype, device and trainability of the first parameter of `sources`."""
    like = next(parameter for module in sources for parameter in module.parameters())
    grid = _pair(lambda axis: conv.grid[axis] or 1)
    blocks = conv.weight[..., :: grid[0], :: grid[1]].unflatten(0, (conv.groups, -1))
    blocks = blocks.unflatten(2, (conv.groups, -1))
    weight = torch.cat([blocks[group, :, group] for group in range(conv.groups)])
    module = nn.Conv2d(
        conv.weight.shape[1],
        conv.out_channels,
        _pair(lambda axis: weight.shape[axis + 2]),
        conv.stride,
        conv.padding,
        grid,
        conv.groups,
        conv.bias is not None,
        conv.padding_mode,  # pyright: ignore[reportArgumentType]
        device=like.device,
        dtype=like.dtype,
    )
    with torch.no_grad():
        module.weight.copy_(weight)
        if module.bias is not None and conv.bias is not None:
            module.bias.copy_(conv.bias)
    return module.requires_grad_(like.requires_grad)


def _successive(convs: Sequence[_Linear]) -> _Linear:
    whole = convs[0]
    for conv in convs[1:]:
        whole = _after(whole, conv)
    return whole


def _after(first: _Linear, second: _Linear) -> _Linear:
    """Return `second` applied to the output of `first`.

    Its tap v reads output position s2 i + v - p2 of the first, so input position
    s1 s2 i + s1 v + u - (s1 p2 + p1).
    """
    _check_meeting(first, second)
    stride, pads = first.stride, any(second.padding)
    kernel = _spread(second.weight, stride)
    whole = F.conv2d(
        first.weight.transpose(0, 1),
        kernel.flip(2, 3),
        padding=_pair(lambda axis: kernel.shape[axis + 2] - 1),
    ).transpose(0, 1)
    bias = second.bias
    if first.bias is not None:
        carried = second.weight.sum((2, 3)) @ first.bias
        bias = carried if bias is None else carried + bias
    return _Linear(
        f"{first.name} and {second.name}",
        whole,
        bias,
        _pair(lambda axis: stride[axis] * second.stride[axis]),
        _pair(lambda axis: first.padding[axis] + stride[axis] * second.padding[axis]),
        _pair(lambda axis: math.gcd(first.grid[axis], stride[axis] * second.grid[axis])),
        math.gcd(first.groups, second.groups),
        "zeros" if pads else first.padding_mode,
    )


def _refuse(wrong: object, message: str) -> None:
    if wrong:
        raise InputError(message)


def _check_device(first: _Linear, second: _Linear) -> None:
    a, b = first.weight.device, second.weight.device
    _refuse(a != b, f"{first.name} is on {a}, {second.name} on {b}: expected all on one device")


def _check_meeting(first: _Linear, second: _Linear) -> None:
    """Check that channels meet, and that what `second` reads beyond its input is zero.

    Beyond its last output `first` would read at least `padding - extent` pixels past the border; it
    reads nothing but zeros for every input size only if that is not negative.
    """
    _check_device(first, second)
    gives, takes = first.out_channels, second.weight.shape[1]
    _refuse(gives != takes, f"{first.name} gives {gives} channels, but {second.name} takes {takes}")
    if not any(second.padding):
        return
    both = f"{second.name} pads the output of {first.name} with zeros"
    for conv in (first, second):
        _refuse(
            conv.padding_mode != "zeros" and any(conv.padding),
            f"{both}, and {conv.name} has padding_mode={conv.padding_mode!r}: only zeros around "
            "both compose exactly",
        )
    _refuse(
        first.bias is not None and (first.bias.is_meta or bool(first.bias.any())),
        f"{both}, where {first.name} on its own would give its bias: not exact at the border. "
        "Remove that bias, or the padding of the second",
    )
    for axis, side in enumerate(("rows", "columns")):
        _refuse(
            second.padding[axis] > 0 and first.padding[axis] < first.extent[axis],
            f"{both}, where {first.name} on its own would still see pixels: expected its padding "
            f"in {side} to be at least dilation * (kernel - 1) = {first.extent[axis]}, got "
            f"{first.padding[axis]}. Pad the first convolution instead, or not at all",
        )


def _parallel(branches: Sequence[nn.Module]) -> list[_Linear]:
    """Return the branches with kernels of one size, padding and grid."""
    _refuse(not branches, "expected at least one branch, got none")
    chains = [_chain(module, f"branch {index}") for index, module in enumerate(branches)]
    known = [_successive(chain) for chain in chains if chain]
    _refuse(not known, "expected at least one convolution among the branches, got identities")
    channels = known[0].weight.shape[1]
    one = torch.eye(channels, dtype=torch.float64, device=known[0].weight.device)[..., None, None]
    convs = [
        _successive(chain)
        if chain
        else _Linear(f"branch {i}", one, None, (1, 1), (0, 0), (0, 0), channels, "zeros")
        for i, chain in enumerate(chains)
    ]
    _check_beside(convs)
    padding = _pair(lambda axis: max(conv.padding[axis] for conv in convs))

    def widened(conv: _Linear) -> _Linear:
        rows, columns = _pair(lambda axis: padding[axis] - conv.padding[axis])
        return replace(conv, weight=F.pad(conv.weight, (columns, columns, rows, rows)))

    def grid(axis: int) -> int:
        steps = [padding[axis] - conv.padding[axis] for conv in convs]
        extent = 2 * padding[axis] - convs[0].growth[axis]  # of the whole
        return math.gcd(*steps, *(conv.grid[axis] for conv in convs), extent)

    same_grid: Any = {"padding": padding, "grid": _pair(grid), "padding_mode": "zeros"}
    return [replace(widened(conv), **same_grid) for conv in convs]


def _check_beside(convs: Sequence[_Linear]) -> None:
    first = convs[0]
    for conv in convs:
        _check_device(first, conv)
        for what, mine, other in (
            ("take different numbers of channels", first.weight.shape[1], conv.weight.shape[1]),
            ("have different strides, so outputs differ in size", first.stride, conv.stride),
            (
                "have outputs that differ in size; 2 * padding - dilation * (kernel - 1) is",
                first.growth,
                conv.growth,
            ),
        ):
            _refuse(mine != other, f"the branches {what}: {first.name} {mine}, {conv.name} {other}")
        _refuse(
            conv.padding_mode != "zeros" and any(conv.padding),
            f"{conv.name} has padding_mode={conv.padding_mode!r}: expected zeros around every "
            "branch",
        )
