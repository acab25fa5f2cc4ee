"""What branches must have in common, and must not do, to be merged."""

from collections.abc import Sequence

from torch import fx, nn

from tresnet.errors import InputError
from tresnet.surgery.merge_rules import check_rule, is_leaf, signature

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def find_leaves(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a branch by name, one with several names under the first.

    Raises:
        InputError: a layer has no rule, or a tensor or a hook is where none can be carried over.
    """
    leaves: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def collect(current: nn.Module, name: str) -> None:
        if id(current) in seen:
            return
        seen.add(id(current))
        is_layer = bool(name) and is_leaf(current)
        for inner in current.modules() if is_layer else [current]:
            _check_hooks(inner, name)
        if is_layer:
            check_rule(current, name)
            leaves[name] = current
            return
        tensors = (current.named_parameters, current.named_buffers)
        own = [key for named in tensors for key, _ in named(recurse=False)]
        if own:
            raise InputError(
                f"{name or 'the branch'} ({type(current).__name__}) holds {own[0]} itself: "
                "expected parameters and buffers in layers alone"
            )
        for key, child in current.named_children():
            collect(child, f"{name}.{key}" if name else key)

    collect(module, "")
    return leaves


def _check_hooks(module: nn.Module, name: str) -> None:
    kinds = [kind for kind in _HOOKS if getattr(module, kind)]
    own = module.named_parameters(recurse=False)
    kinds += [f"{key}._backward_hooks" for key, parameter in own if parameter._backward_hooks]
    if kinds:
        raise InputError(
            f"{name or 'the branch'} ({type(module).__name__}) has hooks ({kinds[0]}), which a "
            "merged layer would not call in the same way: remove them first"
        )


def check_equal(modules: Sequence[nn.Module], graphs: Sequence[fx.Graph]) -> None:
    """Check that branches have equal structure and tensors of their own.

    Raises:
        InputError: they do not; names the layer.
    """
    first = find_leaves(modules[0])
    for index, module in enumerate(modules[1:], start=1):
        leaves = find_leaves(module)
        if list(leaves) != list(first):
            odd = sorted(set(leaves) ^ set(first)) or list(leaves)
            raise InputError(f"branch {index} has other layers than branch 0: {', '.join(odd[:5])}")
        for name, leaf in leaves.items():
            mine, other = signature(first[name]), signature(leaf)
            if mine != other or type(leaf) is not type(first[name]):
                raise InputError(
                    f"{name} differs: {mine} in branch 0, {other} in branch {index}; expected "
                    "branches of equal structure"
                )
            _check_flags(name, first[name], leaf, index)
        if str(graphs[index]) != str(graphs[0]):
            raise InputError(
                f"branch {index} connects its layers otherwise than branch 0: expected branches of "
                "equal structure"
            )
    _check_unshared(modules)


def _check_flags(name: str, first: nn.Module, leaf: nn.Module, index: int) -> None:
    if first.training != leaf.training:
        raise InputError(
            f"{name} is in training mode in one of branch 0 and branch {index} only: call train() "
            "or eval() on all branches"
        )
    for key, parameter in first.named_parameters():
        other = leaf.get_parameter(key)
        for what in ("requires_grad", "dtype", "device"):
            if getattr(parameter, what) != getattr(other, what):
                raise InputError(
                    f"{name}.{key} differs in {what}: {getattr(parameter, what)} in branch 0, "
                    f"{getattr(other, what)} in branch {index}"
                )


def _check_unshared(modules: Sequence[nn.Module]) -> None:
    """Merged tensors are copies, so what was tied would come apart in training."""
    owners: dict[int, str] = {}
    for index, module in enumerate(modules):
        for name, leaf in find_leaves(module).items():
            for key, tensor in [*leaf.named_parameters(), *leaf.named_buffers()]:
                here = f"{name}.{key} of branch {index}"
                owner = owners.setdefault(id(tensor), here)
                if owner != here:
                    raise InputError(
                        f"{owner} and {here} are one tensor, which merging would take apart: "
                        "expected tensors of their own (copy.deepcopy makes them)"
                    )
