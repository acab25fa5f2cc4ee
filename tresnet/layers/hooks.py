"""Replace modules; find hooks and other changes that a replacement would lose."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from tresnet.errors import InputError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def check_model(model: Any) -> None:
    """Raise `InputError` if `model` is not an `nn.Module`, or is compiled."""
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a model (torch.nn.Module), got {model!r}")
    if hasattr(model, "_orig_mod"):
        raise InputError(
            "expected a model, got a compiled one: change the model first, then torch.compile"
        )


def find_hooks(module: nn.Module) -> str | None:
    """Describe a hook, replaced forward or parametrization of `module`; return None without one."""
    hooks = [kind for kind in _HOOKS if getattr(module, kind)]
    if hooks:
        return f"hooks ({hooks[0]})"
    if "forward" in vars(module) or "_conv_forward" in vars(module):
        return "a forward of its own"
    return "a parametrization" if is_parametrized(module) else None


def refuse_hooked(modules: Mapping[str, nn.Module]) -> None:
    """Raise `InputError` if a module has hooks, a replaced forward or a parametrization."""
    for name, module in modules.items():
        what = find_hooks(module)
        if what is not None:
            raise InputError(
                f"{name} ({type(module).__name__}) has {what}, which would be lost or get "
                "other tensors: remove it first, and add it to the result"
            )


def replace_modules(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> None:
    """Replace each module that is a key of `new` by the value, at every place inside `model`."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if name and module in new:
            model.set_submodule(name, new[module])
