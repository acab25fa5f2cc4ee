"""Launches of kernels, as operators of PyTorch where something records them."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

LaunchT = TypeVar("LaunchT", bound=Callable[..., Any])


def operator(
    fake: Callable[..., Any], updates: tuple[str, ...] = ()
) -> Callable[[LaunchT], LaunchT]:
    """Make `tresnet::NAME` of a launch, for `torch.compile`, fake tensors and dispatch modes.

    Where none of them is there, the launch is called as it is: the dispatcher takes longer than
    everything else that the host does for a launch. The operator is the attribute `recorded`.

    Args:
        fake: what the launch returns, without values; called with its arguments.
        updates: names of the arguments that are changed in place.
    """

    def wrap(launch: LaunchT) -> LaunchT:
        @functools.wraps(launch)
        def on_device(*args: Any) -> Any:
            with device_of(args[0]):  # Triton launches on the current one, whatever its arguments
                return launch(*args)

        name = f"tresnet::{launch.__module__.split('.')[-2]}_{launch.__name__}"
        recorded = torch.library.custom_op(name, on_device, mutates_args=updates)
        recorded.register_fake(fake)
        updated = [launch.__code__.co_varnames.index(name) for name in updates]

        @functools.wraps(launch)
        def run(*args: Any) -> Any:
            if is_recorded(args[0]):
                return recorded(*args)
            found = on_device(*args)
            if updated:
                torch.autograd.graph.increment_version([args[index] for index in updated])
            return found

        run.recorded = recorded  # pyright: ignore[reportAttributeAccessIssue]
        return cast(LaunchT, run)

    return wrap


def is_recorded(x: Tensor) -> bool:
    """Whether what is done to `x` goes through PyTorch's dispatcher for someone's sake."""
    return (
        torch.compiler.is_compiling()
        or type(x) not in (Tensor, nn.Parameter)
        or torch._C._len_torch_dispatch_stack() > 0
    )


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Make the device of `x` the current one."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)
