"""Replace modules; find hooks and other changes that a replacement would lose."""

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

from torch import nn

from tresnet.errors import InputError

# Parts of tensors' names that torch.nn.utils adds, and the call that undoes each addition.
_UNDO = (
    ("parametrizations.", "torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')"),
    ("weight_mask", "torch.nn.utils.prune.remove(layer, 'weight')"),
    ("weight_g", "torch.nn.utils.remove_weight_norm(layer)"),
    ("weight_orig", "torch.nn.utils.remove_spectral_norm(layer)"),
)
# Returns the dictionaries of hooks among the attributes of a module.
hooks_of = itemgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)


def check_model(model: Any) -> None:
    """Raise `InputError` if `model` is not an `nn.Module`, or is compiled."""
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a model (torch.nn.Module), got {model!r}")
    if hasattr(model, "_orig_mod"):
        raise InputError(
            "expected a model, got a compiled one: change the model first, then torch.compile"
        )


def find_hooks(modules: Iterable[nn.Module]) -> str | None:
    """Describe the first hook, replaced forward or parametrization of `modules`, or return None."""
    for module in modules:
        own = module.__dict__
        if any(hooks_of(own)):
            what = "hooks"
        elif "forward" in own or "_conv_forward" in own or own.get("_compiled_call_impl"):
            what = "a forward of its own"
        elif "parametrizations" in own["_modules"]:
            what = "a parametrization"
        else:
            continue
        return f"{type(module).__name__} has {what}"
    return None


def undoing_call(names: Iterable[str]) -> str | None:
    """Return the call that undoes what torch.nn.utils changed, or None; `names` are tensors'."""
    names = list(names)
    return next((call for part, call in _UNDO if any(part in name for name in names)), None)


def refuse_hooked(modules: Mapping[str, nn.Module]) -> None:
    """Raise `InputError` if a module has hooks, a replaced forward or a parametrization."""
    for name, module in modules.items():
        hooked = find_hooks([module])
        if hooked is not None:
            call = undoing_call(dict(module.named_parameters()) | dict(module.named_buffers()))
            advice = "remove it" if call is None else f"call {call}"
            raise InputError(
                f"{name}: {hooked}, which would be lost or get other tensors: {advice} first, "
                "and add it to the result"
            )


def replace_modules(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> None:
    """Replace each module that is a key of `new` by the value, at every place inside `model`."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if name and module in new:
            model.set_submodule(name, new[module])
