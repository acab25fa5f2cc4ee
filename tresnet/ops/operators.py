"""Launches of kernels, as operators of PyTorch where something records them."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

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
            x = args[0]  # Triton launches on the current device, whatever its arguments
            if not x.is_cuda or x.get_device() == torch.cuda.current_device():
                return launch(*args)
            with torch.cuda.device(x.device):
                return launch(*args)

        name = f"tresnet::{launch.__module__.split('.')[-2]}_{launch.__name__}"
        recorded = torch.library.custom_op(name, on_device, mutates_args=updates)
        recorded.register_fake(functools.partial(_faked, launch, fake))
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


def _faked(launch: Callable[..., Any], fake: Callable[..., Any], *args: Any) -> Any:
    """What the launch returns, without values; while launches are noted, note its kernels'."""
    if _noted is not None:
        with _disable_current_modes():
            launch(*(_without_values(arg) if isinstance(arg, Tensor) else arg for arg in args))
    return fake(*args)


def _without_values(x: Tensor) -> Tensor:
    span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    storage = torch.empty(x.storage_offset() + span, dtype=x.dtype, device="meta")
    return storage.as_strided(x.shape, x.stride(), x.storage_offset())


def is_recorded(x: Tensor) -> bool:
    """Whether what is done to `x` goes through PyTorch's dispatcher for someone's sake."""
    return (
        torch.compiler.is_compiling()
        or type(x) not in (Tensor, nn.Parameter)
        or torch._C._len_torch_dispatch_stack() > 0
    )


class Launch(NamedTuple):
    """A kernel, its programs, Triton's options, and its arguments: tensors, then numbers."""

    kernel: Any
    grid: tuple[int, int, int]
    options: dict[str, Any]
    tensors: tuple[Tensor, ...]
    numbers: tuple[Any, ...]


_compiled: dict[Any, Any] = {}
_noted: list[Launch] | None = None
_MOST = 4096


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    warps: int,
    tensors: tuple[Tensor, ...],
    numbers: tuple[Any, ...],
) -> None:
    """Launch a Triton kernel.

    What Triton has compiled before for tensors of these types and alignments and the same numbers
    is launched without its asking what to compile, which takes several times as long.

    Args:
        kernel: its function.
        grid: programs.
        warps: of each program.
        tensors: its first arguments.
        numbers: the others, its constants included, in order.
    """
    if _noted is not None:
        _noted.append(Launch(kernel, grid, _options(warps), tensors, numbers))
        return
    key = (
        id(kernel), tensors[0].get_device(), warps, numbers,
        *[x.dtype for x in tensors], *[x.data_ptr() % 16 for x in tensors],
    )  # fmt: skip
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[grid](*tensors, *numbers)
        return
    compiled = kernel[grid](*tensors, *numbers, **_options(warps))
    if compiled is not None:  # it is none in the interpreter
        if len(_compiled) >= _MOST:
            _compiled.clear()
        _compiled[key] = compiled


def _options(warps: int) -> dict[str, Any]:
    # Triton 3.9 warns where neither this nor TRITON_DEFAULT_FP_FUSION says what is its default
    return {"num_warps": warps, "enable_fp_fusion": True}


@contextmanager
def noted() -> Iterator[list[Launch]]:
    """Note what is launched meanwhile, on fakes and on `meta` too, in place of launching it."""
    global _noted
    before, _noted = _noted, []
    try:
        yield _noted
    finally:
        _noted = before
