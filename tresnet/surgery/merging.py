"""Merge parallel branches of equal structure into one module."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from tresnet.errors import InputError
from tresnet.layers.hooks import refuse_hooked


class ParallelBranches(nn.Module):
    """Module that runs G branches of equal structure at once.

    `merged` is one branch, whose parameters and buffers stack the tensors of all branches along a
    new first dimension. `torch.vmap` runs `merged`: convolutions become grouped (or dense, for a
    shared input), and linear layers become a batched matrix product.
    """

    def __init__(self, branches: list[nn.Module], shared_input: bool) -> None:
        super().__init__()
        parameters, buffers = stack_module_state(branches)
        stacks = {**buffers, **{k: nn.Parameter(p, p.requires_grad) for k, p in parameters.items()}}
        new = {id(tensor): stacks[name] for name, tensor in _tensors(branches[0]).items()}
        self.merged = copy.deepcopy(branches[0], new)
        self.groups, self.shared_input = len(branches), shared_input
        self.training = branches[0].training

    def forward(self, x: Tensor) -> Tensor:
        """Return concatenated outputs; x is (N, C, ...) with `shared_input`, else (N, G C, ...)."""
        if not self.shared_input:
            x = x.unflatten(1, (self.groups, -1))
        run = torch.vmap(self._run, (0, None if self.shared_input else 1), randomness="different")
        return run(_tensors(self.merged), x).transpose(0, 1).flatten(1, 2)

    def _run(self, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(self.merged, tensors, (x,))


def merge_parallel(branches: Iterable[nn.Module], *, shared_input: bool = True) -> ParallelBranches:
    """Return one module that runs copies of all branches at once.

    Outputs are concatenated along dimension 1. Outputs and gradients equal those of the branches,
    in eval and training mode. `torch.vmap` must be able to run the branches. For linear layers with
    unequal numbers of outputs use `tresnet.layers.GroupedLinear`. Dropout and drop path draw
    separate random numbers for each branch. With `shared_input`, all branches read one input
    (N, C, ...). Otherwise each branch reads an equal part of the channels, in order.

    `InputError`: branches differ in structure or settings, share tensors, have no tensors, or have
    hooks. The message names the tensor or setting.
    """
    modules = list(branches)
    if not modules or not all(isinstance(m, nn.Module) and _tensors(m) for m in modules):
        raise InputError(f"expected a list of modules with parameters to merge, got {modules}")
    owners: dict[int, str] = {}
    first = _structure(modules[0])
    for index, module in enumerate(modules):
        refuse_hooked({f"branch {index} {name}".rstrip(): m for name, m in module.named_modules()})
        for name, tensor in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ):
            here = f"{name} of branch {index}"
            if (owner := owners.setdefault(id(tensor), here)) != here:
                raise InputError(
                    f"{owner} and {here} are one shared tensor, which merging would copy: expected "
                    "separate tensors (copy.deepcopy)"
                )
        other = _structure(module)
        for key in {**first, **other}:
            if not _same(first.get(key), other.get(key)):
                own, others = (f"{values.get(key)!s:.60}" for values in (first, other))
                raise InputError(
                    f"{key} differs: {own} in branch 0, {others} in branch {index}; expected "
                    "branches of equal structure and settings"
                )
    return ParallelBranches(modules, shared_input)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


_INTERNALS = vars(nn.Module()).keys() - {"training"}


def _structure(branch: nn.Module) -> dict[str, Any]:
    structure: dict[str, Any] = {}
    for name, module in branch.named_modules():
        structure[f"the class of {name or 'the branch'}"] = type(module)
        structure[f"the order in {name or 'the branch'}"] = list(module._modules)
        settings = {key: value for key, value in vars(module).items() if key not in _INTERNALS}
        structure |= {f"{name}.{key}".lstrip("."): value for key, value in settings.items()}
    for name, tensor in _tensors(branch).items():
        structure[name] = tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad
    return structure


def _same(a: Any, b: Any) -> bool:
    """Return whether two settings are equal; a tensor is equal only to itself."""
    try:
        return a is b or (type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b))
    except (RuntimeError, ValueError):  # bool(a == b) fails for arrays and lists of tensors
        return False
