"""Linear convolutions after or beside one another as one, where that is exact."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from tresnet.errors import InputError
from tresnet.layers.grouped_conv import GroupedConv2d
from tresnet.layers.subtracted_conv import SubtractedConv
from tresnet.layers.watched import refuse_watched
from tresnet.surgery import linear_conv
from tresnet.surgery.linear_conv import LinearConv

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
        InputError: a part is not a linear convolution, or the composition is not exact; names it.
    """
    parts = [f"part {index}" for index in range(2 + len(more))]
    chains = [
        _chain(module, name) for module, name in zip((first, second, *more), parts, strict=True)
    ]
    convs = [conv for chain in chains for conv in chain]
    if not convs:
        raise InputError("expected at least one convolution to compose, got identities alone")
    return linear_conv.to_module(_successive(convs), _example((first, second, *more)))


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
    if len(factors) != len(branches):
        raise InputError(
            f"expected one coefficient for each of {len(branches)} branches, got {len(factors)}"
        )
    return linear_conv.to_module(
        linear_conv.added(_parallel(branches), factors), _example(branches)
    )


def compose_cat(*branches: Branch) -> nn.Conv2d:
    """Return the one convolution that gives the concatenated outputs of linear branches.

    Args:
        branches: see `compose_sum`. Groups are filled up with zeros: the result has one group.

    Returns:
        A new `nn.Conv2d`; see `compose`.

    Raises:
        InputError: a branch is not linear or does not fit the others; names it.
    """
    return linear_conv.to_module(linear_conv.concatenated(_parallel(branches)), _example(branches))


def _successive(convs: Sequence[LinearConv]) -> LinearConv:
    whole = convs[0]
    for conv in convs[1:]:
        whole = linear_conv.after(whole, conv)
    return whole


def _parallel(branches: Sequence[nn.Module]) -> list[LinearConv]:
    if not branches:
        raise InputError("expected at least one branch, got none")
    chains = [_chain(module, f"branch {index}") for index, module in enumerate(branches)]
    known = [_successive(chain) for chain in chains if chain]
    if not known:
        raise InputError("expected at least one convolution among the branches, got identities")
    channels = known[0].in_channels
    return [
        _successive(chain) if chain else linear_conv.identity(channels, f"branch {index}")
        for index, chain in enumerate(chains)
    ]


def _chain(module: Any, name: str) -> list[LinearConv]:
    """Return the convolutions of a part in order; none for an identity."""
    if isinstance(module, SubtractedConv):
        refuse_watched(dict(module.named_modules(prefix=name)))
    elif isinstance(module, nn.Module):
        refuse_watched({name: module})
    if isinstance(module, nn.Identity):
        return []
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        # not named_children, which names a convolution that comes twice once only
        return [
            conv
            for child_name, child in module._modules.items()
            for conv in _chain(child, f"{name}.{child_name}")
        ]
    if isinstance(module, SubtractedConv):
        module = module.to_conv()
    if not isinstance(module, nn.Conv2d) or type(module) not in (nn.Conv2d, GroupedConv2d):
        raise InputError(
            f"expected linear convolutions (nn.Conv2d, SubtractedConv or nn.Sequential of them), "
            f"but {name} is {type(module).__name__}"
        )
    return [linear_conv.from_module(module, f"{name} ({_short(module)})")]


def _short(conv: nn.Conv2d) -> str:
    size = "x".join(map(str, conv.kernel_size))
    return f"{size} convolution, {conv.in_channels} to {conv.out_channels} channels"


def _example(modules: Sequence[nn.Module]) -> Tensor:
    return next(parameter for module in modules for parameter in module.parameters())
