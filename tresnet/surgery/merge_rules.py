"""How one layer of every branch becomes one layer of the merged module.

Channels are ordered group after group throughout, so each merged parameter or buffer is the
branches' own, concatenated along its first dimension; `split_tensor` takes it apart again.
"""

import copy
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from tresnet.errors import InputError
from tresnet.layers.blur_pool import BlurPool2d
from tresnet.layers.global_pool import GlobalPool2d
from tresnet.layers.grouped_conv import GroupedConv2d
from tresnet.layers.grouped_linear import GroupedLinear
from tresnet.layers.norm import NormAct
from tresnet.layers.squeeze_excite import SqueezeExcite
from tresnet.models.blocks import HalvingPool

# What a value in the merged module holds: one tensor that all branches would have alike, the
# branches' tensors side by side in the channels, or those with unequal numbers of features.
State = Literal["shared", "grouped", "ragged"]

_ELEMENTWISE = (
    nn.Identity,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Sigmoid,
    nn.Tanh,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.Softplus,
)
_POOLS = (  # and what else treats each channel on its own
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveAvgPool2d,
    nn.ZeroPad2d,
    nn.Flatten,
    GlobalPool2d,
    BlurPool2d,
    HalvingPool,
)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, NormAct)
_OURS = (NormAct, SqueezeExcite, GlobalPool2d, BlurPool2d, HalvingPool, GroupedConv2d)

M = TypeVar("M", bound=nn.Module)


def is_leaf(module: nn.Module) -> bool:
    """Return whether a module is merged as a whole rather than looked into."""
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return False
    if isinstance(module, _OURS) or type(module).__module__.startswith("torch.nn."):
        return True
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return type(module).__module__.startswith("timm.") and bool(own or not module._modules)


def check_rule(leaf: nn.Module, name: str) -> None:
    """Check that a layer can be merged.

    Raises:
        InputError: it cannot; names it.
    """
    if isinstance(leaf, nn.Flatten) and (leaf.start_dim, leaf.end_dim) != (1, -1):
        raise InputError(f"{name} (Flatten): expected to flatten all but the samples")
    if getattr(leaf, "return_indices", False):
        raise InputError(f"{name} returns indices too (return_indices=True): expected one tensor")
    # Of classes that others derive from with another function (timm's, parametrisations), only
    # those known here; norms and what has no parameters are copied, whatever their class.
    known = (
        type(leaf) in (nn.Conv2d, GroupedConv2d, nn.Linear, SqueezeExcite)
        or isinstance(leaf, (*_POOLS, nn.Dropout, nn.Dropout2d))
        or _is_elementwise(leaf)
        or _is_drop_path(leaf)
        or (isinstance(leaf, _NORMS) and all(_is_elementwise(child) for child in leaf.children()))
    )
    if not known:
        raise InputError(
            f"{name} is {type(leaf).__name__}, which has no rule for merging: expected "
            "convolutions, batch norms, linear layers, pools, activations, squeeze and excite"
        )


def _is_elementwise(module: nn.Module) -> bool:
    timms = type(module).__module__ == "timm.layers.activations"
    return isinstance(module, _ELEMENTWISE) or (timms and not list(module.parameters()))


def _is_drop_path(module: nn.Module) -> bool:
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("timm.layers.drop", "DropPath")


def signature(module: nn.Module) -> str:
    """Return what must agree between branches; linear layers may differ in their outputs."""
    if isinstance(module, nn.Linear):
        return f"Linear(in_features={module.in_features}, bias={module.bias is not None})"
    if isinstance(module, nn.AvgPool2d):  # whose repr leaves out some of them
        settings = [f"{key}={getattr(module, key)}" for key in module.__constants__]
        return f"AvgPool2d({', '.join(settings)})"
    return repr(module)


def merge_leaf(
    leaves: Sequence[nn.Module], state: State, name: str
) -> tuple[nn.Module, State, State]:
    """Merge one layer of all branches.

    Args:
        leaves: the layer in each branch, checked, equal but for the values of its tensors.
        state: what the layer's input holds.
        name: what error messages call the layer.

    Returns:
        The merged layer, the state that its input must be brought to, and that of its output.

    Raises:
        InputError: the layer cannot be merged; names it.
    """
    first = leaves[0]
    if state == "ragged" and not (_is_elementwise(first) or isinstance(first, nn.Dropout)):
        raise InputError(
            f"{name} ({type(first).__name__}) follows linear layers with different numbers of "
            "outputs, which only elementwise layers can"
        )
    if isinstance(first, _POOLS) or _is_elementwise(first):
        return copy.deepcopy(first), state, state
    if isinstance(first, nn.Dropout | nn.Dropout2d):  # each branch draws its own
        own: State = "grouped" if state == "shared" else state
        return copy.deepcopy(first), own, own
    if _is_drop_path(first):
        return BranchDropPath(first, len(leaves)).train(first.training), "grouped", "grouped"
    if isinstance(first, nn.Conv2d):
        return _merge_conv(cast(Sequence[nn.Conv2d], leaves), state)
    if isinstance(first, nn.Linear):
        return _merge_linear(cast(Sequence[nn.Linear], leaves), state)
    if isinstance(first, _NORMS):
        return _merge_norm(cast("Sequence[nn.BatchNorm2d]", leaves), name), "grouped", "grouped"
    assert isinstance(first, SqueezeExcite), "find_leaves checks for rules"
    merged = skeleton(first)
    for part in ("fc1", "fc2"):
        convs = [cast(nn.Conv2d, getattr(leaf, part)) for leaf in leaves]
        setattr(merged, part, _merge_conv(convs, "grouped")[0])
    return merged, "grouped", "grouped"


class BranchDropPath(nn.Module):
    """Stochastic depth (arXiv 1603.09382) of side-by-side branches, each of which draws its own."""

    def __init__(self, own: Any, groups: int) -> None:
        """Take over the settings of one branch's DropPath of timm."""
        super().__init__()
        self.drop_prob, self.scale_by_keep = float(own.drop_prob), bool(own.scale_by_keep)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        """(N, G C, ...) to the same, each sample's branches zero or scaled in training."""
        if not self.training or self.drop_prob == 0:
            return x
        keep = 1 - self.drop_prob
        kept = x.new_empty(len(x), self.groups, *[1] * (x.dim() - 1)).bernoulli_(keep)
        if self.scale_by_keep and keep > 0:
            kept /= keep
        return (x.unflatten(1, (self.groups, -1)) * kept).flatten(1, 2)


def _merge_conv(convs: Sequence[nn.Conv2d], state: State) -> tuple[nn.Conv2d, State, State]:
    """Dense on an input that is shared, in groups otherwise."""
    first, count = convs[0], len(convs)
    dense = state == "shared" and first.groups == 1
    with torch.device("meta"):
        merged = GroupedConv2d(
            first.in_channels * (1 if dense else count),
            first.out_channels * count,
            first.kernel_size,  # pyright: ignore[reportArgumentType]
            first.stride,  # pyright: ignore[reportArgumentType]
            first.padding,  # pyright: ignore[reportArgumentType]
            first.dilation,  # pyright: ignore[reportArgumentType]
            1 if dense else count * first.groups,
            first.bias is not None,
            first.padding_mode,
        )
    return _filled(merged, convs), "shared" if dense else "grouped", "grouped"


class RowLinear(nn.Linear):
    """`nn.Linear` for (N, features) alone: of more dimensions, the last would not be dimension 1."""

    def forward(self, input: Tensor) -> Tensor:
        """(N, in) to (N, out).

        Raises:
            InputError: the input has other dimensions.
        """
        if input.dim() != 2:
            raise InputError(
                f"expected (N, {self.in_features}) in front of a merged linear layer, got "
                f"{tuple(input.shape)}"
            )
        return super().forward(input)


def _merge_linear(layers: Sequence[nn.Linear], state: State) -> tuple[nn.Module, State, State]:
    first = layers[0]
    outputs = [layer.out_features for layer in layers]
    after: State = "grouped" if len(set(outputs)) == 1 else "ragged"
    biased = first.bias is not None
    with torch.device("meta"):
        if state == "shared":
            merged: nn.Module = RowLinear(first.in_features, sum(outputs), biased)
        else:
            merged = GroupedLinear(first.in_features, outputs, biased)
    return _filled(merged, layers), state, after


def _merge_norm(norms: Sequence[nn.BatchNorm2d], name: str) -> nn.Module:
    first = norms[0]
    tracked = [cast(Tensor, norm.num_batches_tracked) for norm in norms]
    if first.momentum is None and first.track_running_stats and not tracked[0].is_meta:
        counts = {int(count) for count in tracked}
        if len(counts) > 1:
            raise InputError(
                f"{name} averages its statistics over all batches (momentum=None), and the "
                f"branches have seen different numbers of them: {sorted(counts)}"
            )
    merged = _filled(skeleton(first), norms)
    merged.num_features = first.num_features * len(norms)
    return merged


def _filled(merged: M, leaves: Sequence[nn.Module]) -> M:
    """Give a layer the branches' tensors, concatenated; scalars are the first branch's."""
    first = leaves[0]
    for name, parameter in list(first.named_parameters()):
        values = [leaf.get_parameter(name).detach() for leaf in leaves]
        joined = nn.Parameter(torch.cat(values), requires_grad=parameter.requires_grad)
        _set(merged, name, joined)
    for name, buffer in list(first.named_buffers()):
        values = [leaf.get_buffer(name) for leaf in leaves]
        _set(merged, name, torch.cat(values) if buffer.dim() else buffer.clone())
    return merged.train(first.training)


def skeleton(module: M) -> M:
    """Return a copy whose parameters and buffers have shapes but no values."""
    empty: dict[int, Any] = {}
    for parameter in module.parameters():
        like = torch.empty_like(parameter, device="meta")
        empty[id(parameter)] = nn.Parameter(like, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        empty[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, empty)


def _set(module: nn.Module, name: str, tensor: Tensor) -> None:
    parent, _, last = name.rpartition(".")
    setattr(module.get_submodule(parent), last, tensor)


def split_tensor(tensor: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return each branch's part of a merged parameter or buffer.

    Args:
        tensor: merged.
        shapes: the tensor's shape in each branch.
    """
    if tensor.dim() == 0:
        return [tensor] * len(shapes)
    return list(tensor.split([shape[0] for shape in shapes]))
