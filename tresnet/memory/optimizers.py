"""Optimizers by name, class or function."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch

from tresnet.errors import InputError

OptimizerFactory = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]

# What 'sgd_momentum' adds; the value does not matter to memory.
_MOMENTUM = 0.9
_LEARNING_RATE = 0.01
# These keep what no step of a vision model gives them: sparse gradients or a closure.
_UNUSABLE = {"Optimizer", "SparseAdam", "LBFGS"}


def list_optimizers() -> list[str]:
    """Names that `find_optimizer` knows."""
    return sorted({*_torch_optimizers(), "sgd_momentum"})


def find_optimizer(
    optimizer: str | type[torch.optim.Optimizer] | OptimizerFactory,
    options: Mapping[str, object] | None = None,
) -> tuple[str, OptimizerFactory]:
    """A printable name, and a function from parameters to an optimizer.

    Args:
        optimizer: `sgd`, `sgd_momentum`, `adamw` or the name of another class in `torch.optim`; a
            subclass of `torch.optim.Optimizer`; or a function from parameters to an optimizer.
        options: keyword arguments for a name or a class, such as `weight_decay`.

    Raises:
        InputError: an unknown name, options the class does not take, or something else.
    """
    options = dict(options or {})
    if isinstance(optimizer, str):
        return optimizer.lower(), _by_name(optimizer.lower(), options)
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        return optimizer.__name__.lower(), _of_class(optimizer, options)
    if callable(optimizer):
        return getattr(optimizer, "__name__", "custom"), partial(optimizer, **options)
    raise InputError(
        f"expected an optimizer by name, a torch.optim.Optimizer class or a function from "
        f"parameters to an optimizer, got {type(optimizer).__name__}"
    )


def _by_name(name: str, options: dict[str, object]) -> OptimizerFactory:
    if name == "sgd_momentum":
        return _of_class(torch.optim.SGD, {"momentum": _MOMENTUM, **options})
    known = _torch_optimizers()
    if name not in known:
        raise InputError(
            f"expected an optimizer out of {', '.join(list_optimizers())}, got {name!r}: "
            "name one of these, or pass a class or a function from parameters to an optimizer"
        )
    return _of_class(known[name], options)


def _of_class(cls: type[torch.optim.Optimizer], options: dict[str, object]) -> OptimizerFactory:
    accepted = inspect.signature(cls).parameters
    unknown = [o for o in options if o not in accepted]
    if unknown:
        raise InputError(
            f"expected options that {cls.__name__} takes ({', '.join(accepted)}), "
            f"got {', '.join(unknown)}"
        )
    if "lr" in accepted:
        options = {"lr": _LEARNING_RATE, **options}
    return partial(cls, **options)  # type: ignore[arg-type]


def _torch_optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    return {
        name.lower(): cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type)
        and issubclass(cls, torch.optim.Optimizer)
        and name not in _UNUSABLE
    }
