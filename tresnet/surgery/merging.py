"""Branches of equal structure as one module that runs them at once, and back."""

import copy
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tresnet.errors import InputError
from tresnet.layers.watched import refuse_watched


class ParallelBranches(nn.Module):
    """G branches as one module: (N, C, ...), or (N, G C, ...) if not shared, to (N, G C', ...).

    `merged` is a branch whose parameters and buffers hold those of all, stacked along a first
    dimension. `torch.vmap` runs it: convolutions become grouped ones, or a single dense one on an
    input that is shared, linear layers a batched matrix product.
    """

    def __init__(self, branches: Sequence[nn.Module], shared_input: bool) -> None:
        """Stack the branches' tensors; see `merge_parallel`, which checks them."""
        super().__init__()
        stacked: dict[int, Any] = {}
        tensors = [_tensors(branch) for branch in branches]
        for name, tensor in tensors[0].items():
            stack = torch.stack([own[name].detach() for own in tensors])
            stacked[id(tensor)] = _like(tensor, stack)
        self.merged = copy.deepcopy(branches[0], stacked)
        self.groups, self.shared_input = len(branches), shared_input
        self.training = branches[0].training

    def forward(self, x: Tensor) -> Tensor:
        """Run all branches and concatenate their outputs along dimension 1.

        Raises:
            InputError: a branch calls .item() of a tensor, as a batch norm without momentum does.
        """
        if not self.shared_input:
            x = x.unflatten(1, (self.groups, -1))
        dims = (0, None if self.shared_input else 1, 0)
        # out_dims=1 fails in torch 2.11 where the branches have no tensors and one input
        run = torch.vmap(self._run, dims, randomness="different")
        # the numbers of the branches, in case they have no tensors
        numbers = torch.arange(self.groups, device=x.device)
        try:
            outputs = run(_tensors(self.merged), x, numbers)
        except RuntimeError as error:
            if "calling .item()" not in str(error):
                raise
            raise InputError(
                "expected branches without .item() of a tensor, which torch.vmap cannot run, such "
                "as BatchNorm with momentum=None in training: set a momentum, or call eval()"
            ) from error
        return outputs.transpose(0, 1).flatten(1, 2)

    def _run(self, tensors: dict[str, Tensor], x: Tensor, number: Tensor) -> Tensor:
        return functional_call(self.merged, tensors, (x,), tie_weights=False)

    def extra_repr(self) -> str:
        """Return the settings for `repr`."""
        return f"groups={self.groups}, shared_input={self.shared_input}"


def merge_parallel(branches: Iterable[nn.Module], *, shared_input: bool = True) -> ParallelBranches:
    """Return one module that runs G branches at once; weights are copied, branches unchanged.

    Outputs are those of the branches concatenated along dimension 1, and gradients theirs, in eval
    and in training mode; `split` gives the branches back. Branches may be whatever `torch.vmap`
    runs; linear layers with unequal numbers of outputs go into a `tresnet.layers.GroupedLinear`
    of their own. Dropout and drop path draw for each branch.

    Args:
        branches: G modules of equal structure, each of one tensor argument.
        shared_input: all branches read the same (N, C, ...); else branch g reads the g-th C
            channels of (N, G C, ...).

    Raises:
        InputError: the branches differ in structure or settings, share tensors, or are watched by
            hooks; names what.
    """
    modules = list(branches) if isinstance(branches, Iterable) else [branches]
    if not isinstance(branches, Iterable) or not modules:
        raise InputError(f"expected a list of branches to merge, got {branches!r}")
    owners: dict[int, tuple[int, str]] = {}
    for index, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise InputError(f"expected modules to merge, but branch {index} is {module!r}")
        refuse_watched({f"branch {index} {name}".rstrip(): m for name, m in module.named_modules()})
        for name, tensor in _tensors(module).items():
            owner, known = owners.setdefault(id(tensor), (index, name))
            if owner != index:
                raise InputError(
                    f"{known} of branch {owner} and {name} of branch {index} are one tensor, which "
                    "merging would take apart: expected tensors of their own (copy.deepcopy)"
                )
        _check_equal(modules[0], module, index)
    return ParallelBranches(modules, shared_input)


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
    tensors = _tensors(parallel.merged).values()
    return nn.ModuleList(
        copy.deepcopy(parallel.merged, {id(t): _like(t, t[group].clone()) for t in tensors})
        for group in range(parallel.groups)
    )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; one that is tied under each layer, a shared layer once."""
    return {
        f"{name}.{key}" if name else key: tensor
        for name, layer in module.named_modules()
        for key, tensor in (*layer._parameters.items(), *layer._buffers.items())
        if tensor is not None
    }


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    """`value` as a parameter where `tensor` is one."""
    if not isinstance(tensor, nn.Parameter):
        return value
    return nn.Parameter(value, requires_grad=tensor.requires_grad)


def _check_equal(first: nn.Module, other: nn.Module, index: int) -> None:
    mine, theirs = _structure(first), _structure(other)
    for name in (*mine, *theirs):
        a, b = mine.get(name, {}), theirs.get(name, {})
        key = next((key for key in (*a, *b) if not _same(a.get(key), b.get(key))), None)
        if key is not None:
            raise InputError(
                f"{name or 'the branch'} differs in {key}: {a.get(key)} in branch 0, {b.get(key)} "
                f"in branch {index}; expected branches of equal structure and settings"
            )


_INTERNALS = vars(nn.Module()).keys() - {"training"}


def _structure(branch: nn.Module) -> dict[str, dict[str, Any]]:
    """By each module's name what must agree between branches, sharing and tying included."""
    firsts: dict[int, str] = {}  # the first name of each module and tensor
    found = {}
    for name, module in branch.named_modules(remove_duplicate=False):
        settings = {"class": type(module), "module": firsts.setdefault(id(module), name)}
        settings |= {key: v for key, v in vars(module).items() if key not in _INTERNALS}
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                tied = firsts.setdefault(id(tensor), f"{name}.{key}")
                form = (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)
                settings[key] = (*form, f"tied to {tied}")
        found[name] = {**settings, "children in this order": list(module._modules)}
    return found


def _same(a: Any, b: Any) -> bool:
    """Whether two settings are surely equal."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, functools.partial):
        return _same((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if isinstance(a, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)
