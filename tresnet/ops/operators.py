"""Launches of kernels, and their operators for fake tensors and dispatch modes.

`operator` registers a launch as a custom operator, which is used only if something records
operations; otherwise the launch is called directly. `launch` runs a kernel. While `noted` is
active, launches are collected instead of run.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter, or_
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

LaunchT = TypeVar("LaunchT", bound=Callable[..., Any])


def operator(
    fake: Callable[..., Any], updates: tuple[str, ...] = ()
) -> Callable[[LaunchT], LaunchT]:
    """Register a launch as the operator `tresnet::NAME`, for fake tensors and dispatch modes.

    Without these the launch is called directly, as the dispatcher takes longer than all other host
    work of a launch. `fake` gets the launch's arguments and returns its results without values.
    `updates` names the arguments that are changed in place. The operator is the attribute
    `recorded`.
    """

    def wrap(launch: LaunchT) -> LaunchT:
        name = f"tresnet::{launch.__module__.split('.')[-2]}_{launch.__name__}"
        recorded = torch.library.custom_op(name, launch, mutates_args=updates)
        recorded.register_fake(functools.partial(_faked, launch, fake))
        updated = [launch.__code__.co_varnames.index(name) for name in updates]

        @functools.wraps(launch)
        def run(*args: Any) -> Any:
            if type(args[0]) not in _PLAIN or _len_dispatch_stack():
                return recorded(*args)
            found = launch(*args)
            if updated:
                torch.autograd.graph.increment_version([args[index] for index in updated])
            return found

        run.recorded = recorded  # pyright: ignore[reportAttributeAccessIssue]
        return cast(LaunchT, run)

    return wrap


def _faked(launch: Callable[..., Any], fake: Callable[..., Any], *args: Any) -> Any:
    """Return the launch's results without values; collect the launch while `noted` is active."""
    if _noted is not None:
        with _disable_current_modes():
            launch(*(_without_values(arg) if isinstance(arg, Tensor) else arg for arg in args))
    return fake(*args)


def _without_values(x: Tensor) -> Tensor:
    span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    storage = torch.empty(x.storage_offset() + span, dtype=x.dtype, device="meta")
    return storage.as_strided(x.shape, x.stride(), x.storage_offset())


class Launch(NamedTuple):
    """One launch of a kernel; its arguments are the tensors, then the numbers."""

    kernel: Any
    grid: tuple[int, int, int]
    options: dict[str, Any]
    tensors: tuple[Tensor, ...]
    numbers: tuple[Any, ...]


class _Compiled(NamedTuple):
    """A compiled kernel, and how to launch it."""

    kernel: Any  # Triton's object, whose launches call all hooks
    # called with the grid, the stream, and addresses and numbers
    run: Callable[[tuple[int, int, int], int, tuple[Any, ...]], object]
    driver: Any
    settings: Any  # Triton's, which contain the hooks


_PLAIN = (Tensor, nn.Parameter)
_dtype = attrgetter("dtype")
_len_dispatch_stack = torch._C._len_torch_dispatch_stack
_compiled: dict[Any, _Compiled] = {}
_noted: list[Launch] | None = None
_MOST = 4096


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    warps: int,
    tensors: tuple[Tensor, ...],
    numbers: tuple[Any, ...],
) -> None:
    """Launch a Triton kernel on the device of its first tensor, where all others must be.

    Triton's own function takes several times as long as a launch of the compiled kernel. It
    therefore runs only once for the same dtypes, alignments and numbers. Later launches pass
    addresses, which is faster than passing tensors. The kernel's arguments are the tensors, then
    the numbers, constants included.
    """
    if _noted is not None:
        _noted.append(Launch(kernel, grid, _options(warps), tensors, numbers))
        return
    device = tensors[0].get_device()
    # Triton compiles a kernel for addresses that 16 divides, and another one for those it does not
    addresses = [*map(Tensor.data_ptr, tensors)]
    misaligned = functools.reduce(or_, addresses) % 16 and tuple(a % 16 for a in addresses)
    key = id(kernel), device, warps, misaligned, numbers, *map(_dtype, tensors)
    found = _compiled.get(key)
    if found is None:
        with torch.cuda.device(device):  # Triton launches on the current one
            compiled = kernel[grid](*tensors, *numbers, **_options(warps))
        if compiled is not None:  # it is none in the interpreter
            _remember(key, compiled)
        return
    compiled, run, driver, settings = found
    active = driver.active
    if device != active.get_current_device() or _hooked(settings):
        with torch.cuda.device(device):
            compiled[grid](*tensors, *numbers)
    else:
        run(grid, active.get_current_stream(device), (*addresses, *numbers))


def _remember(key: Any, compiled: Any) -> None:
    from triton import knobs
    from triton.runtime import driver

    if len(_compiled) >= _MOST:
        _compiled.clear()
    _compiled[key] = _Compiled(compiled, _run_of(compiled), driver, knobs.runtime)


def _run_of(compiled: Any) -> Any:
    """Return the `run` of a compiled kernel.

    On NVIDIA's GPUs it bypasses the Python of Triton's launcher, which allocates scratch memory and
    adds constant arguments. These kernels need no scratch; a first call records the constants.
    """
    launcher, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    passed, mark = list[Any](), object()
    if getattr(launcher, "global_scratch_size", 1) == 0 == launcher.profile_scratch_size:
        first = copy.copy(launcher)
        first.launch = lambda *args: passed.extend(args)
        first(1, 2, 3, 4, function, metadata, None, None, None, mark)
    if passed[:5] == [1, 2, 3, 4, function] and passed[-1] in (mark, (mark,)):
        launch, constants = launcher.launch, passed[5:-1]
        if passed[-1] is mark:  # as in Triton 3.6
            return lambda grid, stream, args: launch(*grid, stream, function, *constants, *args)
        return lambda grid, stream, args: launch(*grid, stream, function, *constants, args)
    constants = function, metadata, None, None, None
    return lambda grid, stream, args: launcher(*grid, stream, *constants, *args)


def _hooked(settings: Any) -> bool:
    """Return whether a profiler may have set hooks: an empty chain of Triton has no `calls`."""
    enter, leave = settings.launch_enter_hook, settings.launch_exit_hook
    return getattr(enter, "calls", True) or getattr(leave, "calls", True)


def _options(warps: int) -> dict[str, Any]:
    # Triton 3.9 warns where neither this nor TRITON_DEFAULT_FP_FUSION says what is its default
    return {"num_warps": warps, "enable_fp_fusion": True}


@contextmanager
def noted() -> Iterator[list[Launch]]:
    """Collect launches in the block, also on fakes and on `meta`, instead of running them."""
    global _noted
    before, _noted = _noted, []
    try:
        yield _noted
    finally:
        _noted = before
