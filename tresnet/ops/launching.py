"""Launches of Triton kernels.

A launch function allocates its results, and gives `launch` the tensors and a `Form`, all by the
names of the kernel's arguments. Tensors without values (fakes, and those on `meta`) are allocated
but not computed, so that predictions of memory run these functions too.
"""

import copy
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Form:
    """A kernel with its grid and numbers, for tensors of one form (`tiles.by_form`).

    Their dtypes and device are always the same, as `launch` does not read them again.

    Args:
        name: Folder of the operation, and its kernel, as in "abn.apply".
        warps: Of a program.
        grid: Programs along one or two axes.
        numbers: All arguments of the kernel that are no tensors, constants included. Names that
            the kernel does not have are ignored.
    """

    def __init__(self, name: str, warps: int, grid: tuple[int, ...], **numbers: Any) -> None:
        folder, kernel = name.split(".")
        # at the first launch: Triton may be absent, and is slow to import
        self.kernel = getattr(importlib.import_module(f"tresnet.ops.{folder}.kernels"), kernel)
        self.grid = (*grid, 1, 1)[:3]
        # Triton 3.9 warns unless this or TRITON_DEFAULT_FP_FUSION is set, even to the default
        self.options = {"num_warps": warps, "enable_fp_fusion": True}
        self.numbers = {name: numbers[name] for name in self.kernel.arg_names if name in numbers}
        self.compiled: dict[Any, _Compiled] = {}  # by alignment
        self.dtypes: list[torch.dtype] | None = None


class Launch(NamedTuple):
    """One launch of a kernel; its arguments by name, in order."""

    kernel: Any
    grid: tuple[int, ...]
    options: dict[str, Any]
    arguments: dict[str, Any]


class _Compiled(NamedTuple):
    """A compiled kernel, and how to launch it."""

    kernel: Any  # Triton's object, whose launches call all hooks
    device: int
    run: Callable[[int, list[int]], object]  # called with the stream and addresses
    driver: Any
    settings: Any  # Triton's, which contain the hooks


_PLAIN = (Tensor, nn.Parameter)
_noted: list[Launch] | None = None


def launch(form: Form, **tensors: Tensor) -> None:
    """Launch a Triton kernel with all its tensors, in the order of its arguments.

    Triton's own function takes several times as long as a launch of the compiled kernel. It
    therefore runs only once for a form and its alignments. Later launches pass addresses, which is
    faster than passing tensors. Raises `ValueError` if that first launch has tensors on several
    devices.
    """
    if _noted is not None:
        _noted.append(Launch(form.kernel, form.grid, form.options, tensors | form.numbers))
    values = [*tensors.values()]
    if type(values[-1]) not in _PLAIN:
        return  # a fake: the last one is a result, while a parameter may have values
    # Triton compiles a kernel for addresses that 16 divides, and another one for those it does not
    addresses = [*map(Tensor.data_ptr, values)]
    misaligned = functools.reduce(or_, addresses) % 16 and tuple(a % 16 for a in addresses)
    found = form.compiled.get(misaligned)
    if found is None:
        _launch_first(form, misaligned, tensors)
        return
    kernel, device, run, driver, settings = found
    active = driver.active
    if device != active.get_current_device() or _hooked(settings):
        with torch.cuda.device(device):
            kernel[form.grid](*values, *form.numbers.values())
    else:
        run(active.get_current_stream(device), addresses)


def _launch_first(form: Form, misaligned: Any, tensors: dict[str, Tensor]) -> None:
    device, *others = {tensor.device for tensor in tensors.values()}
    if others:
        raise ValueError(f"expected tensors on one device, got {device} and {others[0]}")
    if device.type == "meta":
        return
    # later launches pass neither names nor dtypes
    assert [*tensors, *form.numbers] == [*form.kernel.arg_names]
    dtypes = [tensor.dtype for tensor in tensors.values()]
    assert form.dtypes in (None, dtypes), (form.kernel, form.dtypes, dtypes)
    form.dtypes, index = dtypes, next(iter(tensors.values())).get_device()
    with torch.cuda.device(index):  # Triton launches on the current one
        compiled = form.kernel[form.grid](**tensors, **form.numbers, **form.options)
    if compiled is None:  # in the interpreter
        return
    from triton import knobs
    from triton.runtime import driver

    run = _run_of(compiled, form.grid, tuple(form.numbers.values()))
    form.compiled[misaligned] = _Compiled(compiled, index, run, driver, knobs.runtime)


def _run_of(
    compiled: Any, grid: tuple[int, ...], numbers: tuple[Any, ...]
) -> Callable[[int, list[int]], object]:
    """Return a function that launches a compiled kernel.

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
        launch, (x, y, z), constants = launcher.launch, grid, passed[5:-1]
        if passed[-1] is mark:  # as in Triton 3.6
            return lambda stream, addresses: launch(
                x, y, z, stream, function, *constants, *addresses, *numbers
            )
        return lambda stream, addresses: launch(
            x, y, z, stream, function, *constants, (*addresses, *numbers)
        )
    constants = function, metadata, None, None, None
    return lambda stream, addresses: launcher(*grid, stream, *constants, *addresses, *numbers)


def _hooked(settings: Any) -> bool:
    """Return whether a profiler may have set hooks; Triton's chain without hooks has no `calls`."""
    enter, leave = settings.launch_enter_hook, settings.launch_exit_hook
    return getattr(enter, "calls", True) or getattr(leave, "calls", True)


@contextmanager
def noted() -> Iterator[list[Launch]]:
    """Collect the launches in the block, also those of tensors without values."""
    global _noted
    before, _noted = _noted, []
    try:
        yield _noted
    finally:
        _noted = before
