"""Compose consecutive linear convolutions into one, if the result is exact.

For each tap (an index in the kernel), output i of a convolution reads input position
stride * i + tap - padding. Inputs outside the border are zero. Kernels are first expanded to one
group and dilation 1. The composed kernel is the transposed convolution of the second expanded
kernel by the first. NumPy arrays in this module hold two values, for rows and columns.
"""

from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tresnet.errors import InputError
from tresnet.layers.hooks import check_model, refuse_hooked, replace_modules
from tresnet.layers.subtracted_conv import SubtractedConv


def compose(*parts: nn.Module) -> nn.Module:
    """Return one convolution that equals the given convolutions in sequence.

    `parts` are `nn.Conv2d`, `SubtractedConv`, or `nn.Sequential` of these, and are not changed. The
    result has one group, and the dtype and device of the first weight. The new weight is computed
    in float64. The result may take more operations than all parts together.

    If only the first convolution pads, the result is exact for every input size. If a later one
    pads, the composition of all before it must have no bias, and padding of at least kernel - 1.

    If the only part is a model such as a ResNet50, `compose` replaces each `SubtractedConv` in
    place by an `nn.Conv2d`, and returns the model. Train the model first, because `compose` removes
    the three small convolutions that a `SubtractedConv` trains. `InputError`: a part is not a
    linear convolution, has hooks or a parametrization, or cannot be composed exactly; or a model
    has no `SubtractedConv`.
    """
    for index, part in enumerate(parts):
        check_model(part)
        if len(parts) > 1 or _is_linear(part):
            refuse_hooked(dict(part.named_modules(prefix=f"part {index}")))
    if len(parts) == 1 and not _is_linear(parts[0]):
        return _compose_inside(parts[0])
    convs = [conv for i, part in enumerate(parts) for conv in _flattened(part, f"part {i}")]
    if not convs:
        raise InputError("expected at least one convolution to compose, got none")
    return _to_module(reduce(_after, convs), next(p for part in parts for p in part.parameters()))


class _Linear(NamedTuple):
    """A convolution with one group and dilation 1; `weight` (out, in, rows, columns) is float64."""

    name: str
    weight: Tensor
    bias: Tensor | None
    stride: np.ndarray
    padding: np.ndarray
    grid: np.ndarray  # greatest common divisor of the distances between taps; 0 for one tap


def _is_linear(module: nn.Module) -> bool:
    if type(module) is nn.Sequential:
        return all(map(_is_linear, module))
    return type(module) is nn.Conv2d or isinstance(module, SubtractedConv | nn.Identity)


def _compose_inside(model: nn.Module) -> nn.Module:
    """Replace each `SubtractedConv` of a model by an `nn.Conv2d`; shared modules stay shared."""
    old = {name: m for name, m in model.named_modules() if isinstance(m, SubtractedConv)}
    if not old:
        raise InputError(
            "expected linear convolutions (nn.Conv2d, SubtractedConv or nn.Sequential of them), or "
            f"a model with a SubtractedConv inside, got {type(model).__name__} without one"
        )
    for prefix, conv in old.items():
        refuse_hooked(dict(conv.named_modules(prefix=prefix)))
    replace_modules(model, {conv: conv.to_conv() for conv in old.values()})
    return model


def _flattened(module: nn.Module, name: str) -> list[_Linear]:
    if isinstance(module, SubtractedConv):
        module = module.to_conv()
    if isinstance(module, nn.Identity):
        return []
    if type(module) is nn.Sequential:
        # read `_modules`, because `named_children` leaves out repeated modules
        parts = module._modules.items()
        return [c for key, child in parts if child for c in _flattened(child, f"{name}.{key}")]
    if type(module) is not nn.Conv2d or module.weight.is_complex():
        raise InputError(
            "expected real linear convolutions (nn.Conv2d, SubtractedConv or nn.Sequential of "
            f"them), but {name} is {type(module).__name__}"
        )
    if isinstance(module.padding, str) or (module.padding_mode != "zeros" and any(module.padding)):
        raise InputError(
            f"{name} has padding={module.padding!r} and padding_mode={module.padding_mode!r}: "
            "expected numbers of zeros"
        )
    weight = module.weight.detach().double()
    one = torch.eye(module.out_channels).to(weight)[..., None, None]
    size = "x".join(map(str, module.kernel_size))
    return [
        _Linear(
            f"{name} ({size}, {module.in_channels} to {module.out_channels} channels)",
            F.conv_transpose2d(one, weight, dilation=module.dilation, groups=module.groups),
            None if module.bias is None else module.bias.detach().double(),
            np.array(module.stride),
            np.array(module.padding),
            np.where(np.array(module.kernel_size) > 1, module.dilation, 0),
        )
    ]


def _after(first: _Linear, second: _Linear) -> _Linear:
    """Return one convolution that equals `first`, then `second`.

    Let s1, s2 be the strides and p1, p2 the paddings. For output i, tap v of `second` reads
    position s2 i + v - p2 of the output of `first`. For that position, tap u of `first` reads
    input position s1 s2 i + s1 v + u - (s1 p2 + p1).
    """
    _check_exact(first, second)
    bias = second.bias
    if first.bias is not None:
        first_bias = second.weight.sum((2, 3)) @ first.bias
        bias = first_bias if bias is None else bias + first_bias
    return _Linear(
        f"{first.name} and {second.name}",
        F.conv_transpose2d(second.weight, first.weight, stride=first.stride.tolist()),
        bias,
        first.stride * second.stride,
        first.padding + first.stride * second.padding,
        np.gcd(first.grid, first.stride * second.grid),
    )


def _check_exact(first: _Linear, second: _Linear) -> None:
    # If `second` pads, `first` must give zeros beyond its border, where `second` reads them. So
    # `first` must have no bias, and a padding of at least kernel - 1.
    gives, takes = len(first.weight), second.weight.shape[1]
    if gives != takes:
        raise InputError(f"{first.name} gives {gives} channels, but {second.name} takes {takes}")
    both = f"{second.name} pads the output of {first.name} with zeros"
    if any(second.padding) and first.bias is not None:
        raise InputError(
            f"{both}, where {first.name} on its own would give its bias: remove bias or padding"
        )
    extent = np.array(first.weight.shape[2:]) - 1
    if any((second.padding > 0) & (first.padding < extent)):
        raise InputError(
            f"{both}, where {first.name} on its own would still read pixels: expected its padding "
            f"to be at least dilation * (kernel - 1) = {extent}, got {first.padding}"
        )


def _to_module(conv: _Linear, like: nn.Parameter) -> nn.Conv2d:
    dilation = np.where(conv.grid, conv.grid, 1)
    weight = conv.weight[..., :: dilation[0], :: dilation[1]]
    pairs = {"stride": conv.stride, "padding": conv.padding, "dilation": dilation}
    settings: dict[str, Any] = {name: tuple(pair.tolist()) for name, pair in pairs.items()}
    module = convolution(weight, conv.bias, like, **settings)
    return module.requires_grad_(like.requires_grad)


def convolution(
    weight: Tensor, bias: Tensor | None, like: Tensor, groups: int = 1, **settings: Any
) -> nn.Conv2d:
    """Return a convolution of these values, in the dtype and memory format of the weight `like`.

    `settings` are other arguments of `nn.Conv2d`. `InputError`: values overflow the dtype.
    """
    module = nn.Conv2d(
        weight.shape[1] * groups, len(weight), (weight.shape[2], weight.shape[3]), groups=groups,
        bias=bias is not None, device="meta", dtype=like.dtype, **settings,
    )  # fmt: skip
    layout = torch.contiguous_format if like.is_contiguous() else torch.channels_last
    module.weight = nn.Parameter(weight.to(like.dtype).contiguous(memory_format=layout))
    if bias is not None:
        module.bias = nn.Parameter(bias.to(like.dtype))
    for exact, values in ((weight, module.weight), (bias, module.bias)):
        if exact is None or values is None or exact.is_meta:
            continue
        if bool((exact.isfinite() & ~values.isfinite()).any()):
            raise InputError(
                f"the weights are beyond the range of {like.dtype}: fold or compose the model in "
                "float32, then convert it"
            )
    return module
