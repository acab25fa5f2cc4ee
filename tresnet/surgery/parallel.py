"""Merged branches, taking them apart again, and choosing how their convolutions run."""

import copy
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tresnet.errors import InputError
from tresnet.layers.grouped_conv import GroupedConv2d, GroupedImpl
from tresnet.surgery.merge_rules import skeleton, split_tensor


class ParallelBranches(nn.Module):
    """G branches as one module: (N, C, ...), or (N, G C, ...) if not shared, to (N, G C', ...).

    `merged` has the branches' own layer and parameter names; each tensor holds the branches', one
    after another along its first dimension.
    """

    __jit_unused_properties__ = ("groups",)

    def __init__(
        self, merged: nn.Module, branches: Sequence[nn.Module], shared_input: bool
    ) -> None:
        """Keep the merged module, and the branches without their values.

        Args:
            merged: what `tresnet.surgery.merge_parallel` built.
            branches: what it was built from.
            shared_input: whether all branches read the same input.
        """
        super().__init__()
        self.merged = merged
        self.shared_input = shared_input
        self.wrapped = False
        self.training = branches[0].training
        for name, module in merged.named_modules():
            module.training = branches[0].get_submodule(name).training
        # in a list, so that they are no sub-modules
        self._skeletons = [skeleton(branch) for branch in branches]

    @property
    def groups(self) -> int:
        """Number of branches."""
        return len(self._skeletons)

    def forward(self, x: Tensor) -> Tensor:
        """Run all branches and concatenate their outputs along dimension 1."""
        return self.merged(x)

    def extra_repr(self) -> str:
        """Return the settings for `repr`."""
        return f"groups={self.groups}, shared_input={self.shared_input}"


@torch.no_grad()
def split(parallel: ParallelBranches) -> nn.ModuleList:
    """Return the branches of a merged module, with its present weights and statistics.

    Args:
        parallel: from `merge_parallel`; not changed.

    Returns:
        Modules like those that were merged, on the device and in the mode of the merged one.

    Raises:
        InputError: the argument is no merged module.
    """
    if not isinstance(parallel, ParallelBranches):
        raise InputError(f"expected what merge_parallel returned, got {type(parallel).__name__}")
    merged = _tensors(parallel.merged)
    modes = {name: module.training for name, module in parallel.merged.named_modules()}
    skeletons = parallel._skeletons
    branches = [copy.deepcopy(skeleton) for skeleton in skeletons]
    shapes = [{name: t.shape for name, t in _tensors(s).items()} for s in skeletons]
    for name, tensor in merged.items():
        parts = split_tensor(tensor, [own[name] for own in shapes])
        for branch, part in zip(branches, parts, strict=True):
            _put(branch, name, part.clone(), tensor)
    for branch in branches:
        for name, module in branch.named_modules():
            module.training = modes.get(name, parallel.training)
    return nn.ModuleList(branch[0] if parallel.wrapped else branch for branch in branches)  # pyright: ignore[reportIndexIssue]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _put(branch: nn.Module, name: str, value: Tensor, like: Tensor) -> None:
    parent, _, last = name.rpartition(".")
    if isinstance(like, nn.Parameter):
        value = nn.Parameter(value, requires_grad=like.requires_grad)
    setattr(branch.get_submodule(parent), last, value)


def pick_fastest(module: nn.Module, x: Tensor, repeats: int = 5) -> dict[str, str]:
    """Time each grouped convolution in every way it can run, and keep the fastest, in place.

    Each is timed alone, forward and backward, on inputs of the shape, dtype and memory format it
    gets when the module runs on `x`, on the device of `x`.

    Args:
        module: holds `GroupedConv2d`s.
        x: an input of the module.
        repeats: timed runs of each way; the least time counts.

    Returns:
        The name of each grouped convolution and its way: 'conv', 'matmul' or 'loop'.

    Raises:
        InputError: `repeats` is below 1.
    """
    if repeats < 1:
        raise InputError(f"expected at least 1 repeat, got {repeats}")
    inputs: dict[str, Tensor] = {}
    convs = {n: m for n, m in module.named_modules() if isinstance(m, GroupedConv2d)}

    def remember(name: str) -> Any:
        return lambda _, arguments: inputs.setdefault(name, torch.empty_like(arguments[0]))

    handles = [
        conv.register_forward_pre_hook(remember(name))
        for name, conv in convs.items()
        if len(conv.impls()) > 1
    ]
    was_training = {name: m.training for name, m in module.named_modules()}
    try:
        module.eval()  # running statistics stay as they are
        with torch.no_grad():
            module(x)
    finally:
        for handle in handles:
            handle.remove()
        for name, inner in module.named_modules():
            inner.training = was_training[name]
    for name, example in inputs.items():
        times_s: dict[GroupedImpl, float] = dict.fromkeys(convs[name].impls(), math.inf)
        for _ in range(repeats):  # in turns, so that other load on the machine meets all alike
            for impl, best_s in times_s.items():
                times_s[impl] = min(best_s, _time(convs[name], impl, example))
        convs[name].use(min(times_s, key=times_s.__getitem__))
    return {name: conv.impl for name, conv in convs.items()}


def _time(conv: GroupedConv2d, impl: GroupedImpl, example: Tensor) -> float:
    """Seconds of one forward and backward pass, after one that is not timed."""
    before, time_s = conv.impl, 0.0
    conv.use(impl)
    x = torch.zeros_like(example).requires_grad_()
    try:
        for _ in range(2):
            _wait(x)
            began_s = time.perf_counter()
            y = conv(x)
            torch.autograd.grad(y, [x, *(p for p in conv.parameters() if p.requires_grad)], y)
            _wait(x)
            time_s = time.perf_counter() - began_s
    finally:
        conv.use(before)
    return time_s


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
