"""Launches of Triton kernels.

The functions of each `launch.py` allocate results, and call `launch` with a `LaunchSpec` (kernel,
grid and numbers) and with tensors named as the kernel's arguments. Results that are fake or meta
tensors are allocated but not computed, so that predictions of memory run the same functions.
"""

import copy
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class LaunchSpec:
    """A kernel with its grid and numbers, for maps of one shape, strides and dtype.

    All launches of a spec must have the same dtypes and device, and the same tensors that are None:
    only the first launch reads them.

    Args:
        name: Module below `tresnet.ops` and name of the kernel, as in "abn.kernels.apply".
        warps: Number of warps of a program.
        grid: Number of programs along one or two axes.
        numbers: The kernel's arguments other than tensors, including constants. Names that the
            kernel does not have are ignored.
    """

    def __init__(self, name: str, warps: int, grid: tuple[int, ...], **numbers: Any) -> None:
        module, _, kernel = name.rpartition(".")
        # imported only here, because Triton may be absent and is slow to import
        self.kernel = getattr(importlib.import_module(f"tresnet.ops.{module}"), kernel)
        self.grid = (*grid, 1, 1)[:3]
        # Triton 3.9 warns unless enable_fp_fusion or TRITON_DEFAULT_FP_FUSION is set
        self.options = {"num_warps": warps, "enable_fp_fusion": True}
        self.numbers = {name: numbers[name] for name in self.kernel.arg_names if name in numbers}
        self.compiled: dict[Any, _Compiled] = {}  # each key is `misaligned` of `launch`
        self.dtypes: list[torch.dtype | None] | None = None


class Launch(NamedTuple):
    """One launch of a kernel; `arguments` has names and values in the order of the kernel."""

    kernel: Any
    grid: tuple[int, ...]
    options: dict[str, Any]
    arguments: dict[str, Any]

    def constants(self) -> dict[str, Any]:
        """Return the constants and the absent tensors, for which Triton compiles a kernel."""
        # kernels annotate constants alone; `kernel.constexprs` is missing if Triton interprets
        names, values = self.kernel.fn.__annotations__, self.arguments
        return {name: value for name, value in values.items() if name in names or value is None}

    def variant(self) -> tuple[Any, ...]:
        """Return all that decides which code Triton compiles, but the alignment of addresses."""
        values = self.arguments.values()
        dtypes = tuple(x.dtype if isinstance(x, Tensor) else None for x in values)
        return self.kernel.__name__, dtypes, tuple(sorted(self.constants().items(), key=str))


class _Compiled(NamedTuple):
    kernel: Any  # Triton's object; `kernel[grid](...)` calls Triton's hooks
    device: int
    run: Callable[[int, list[int]], object]  # takes a stream and tensors' addresses
    driver: Any
    enter_hooks: list[Any]  # Triton's own lists, to which its profiler adds hooks
    exit_hooks: list[Any]


_PLAIN = (Tensor, nn.Parameter)
_records: list[list[Launch]] = []  # one for each active `recorded_launches`


def launch(spec: LaunchSpec, **tensors: Tensor | None) -> None:
    """Launch a Triton kernel with all its tensors, in the order of its arguments.

    A tensor that is None is absent, and the kernel is compiled without it. The last tensor is a
    result. Triton's own launcher takes several times as long as a direct launch of the compiled
    kernel. So Triton's launcher runs only at the first launch for a spec and an alignment of
    addresses; later launches pass addresses. The first launch raises `ValueError` if the tensors
    are on several devices.
    """
    for record in _records:
        record.append(Launch(spec.kernel, spec.grid, spec.options, tensors | spec.numbers))
    values = [*tensors.values()]
    if type(values[-1]) not in _PLAIN:
        return  # the last tensor, a result, is fake; other tensors may be real parameters
    # Triton compiles one kernel for addresses that 16 divides, and another for other addresses
    # the compiled kernel ignores the address of a tensor that is absent
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in values]
    misaligned = reduce(or_, addresses) % 16 and tuple(a % 16 for a in addresses)
    compiled = spec.compiled.get(misaligned)
    if compiled is None:
        _launch_first(spec, misaligned, tensors)
        return
    kernel, device, run, driver, enter_hooks, exit_hooks = compiled
    if enter_hooks or exit_hooks or device != driver.get_current_device():
        with torch.cuda.device(device):
            kernel[spec.grid](*values, *spec.numbers.values())
    else:
        run(driver.get_current_stream(device), addresses)


def _launch_first(spec: LaunchSpec, misaligned: Any, tensors: dict[str, Tensor | None]) -> None:
    device, *others = {tensor.device for tensor in tensors.values() if tensor is not None}
    if others:
        raise ValueError(f"expected tensors on one device, got {device} and {others[0]}")
    if device.type == "meta":
        return
    # checked only here, because later launches pass neither names nor dtypes
    assert [*tensors, *spec.numbers] == [*spec.kernel.arg_names]
    dtypes = [None if tensor is None else tensor.dtype for tensor in tensors.values()]
    assert spec.dtypes in (None, dtypes), (spec.kernel, spec.dtypes, dtypes)
    spec.dtypes, index = dtypes, -1 if device.index is None else device.index
    with torch.cuda.device(index):  # Triton launches on the current device
        compiled = spec.kernel[spec.grid](**tensors, **spec.numbers, **spec.options)
    if compiled is None:  # Triton's interpreter compiles nothing
        return
    from triton import knobs
    from triton.runtime import driver

    run = _direct(compiled, spec.grid, tuple(spec.numbers.values()))
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    calls = (getattr(hook, "calls", [hook]) for hook in hooks)  # [hook] keeps Triton's launcher
    spec.compiled[misaligned] = _Compiled(compiled, index, run, driver.active, *calls)


def _direct(
    compiled: Any, grid: tuple[int, ...], numbers: tuple[Any, ...]
) -> Callable[[int, list[int]], object]:
    """Return a function of a stream and tensors' addresses that launches a compiled kernel.

    On NVIDIA GPUs, the function bypasses the Python code of Triton's launcher, unless the kernel
    needs scratch memory. That code adds constant arguments, so they are recorded here once.
    """
    launcher, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    passed, mark = list[Any](), object()
    if getattr(launcher, "global_scratch_size", 1) == 0 == launcher.profile_scratch_size:
        first = copy.copy(launcher)
        first.launch = lambda *args: passed.extend(args)
        first(1, 2, 3, 4, function, metadata, None, None, None, mark)
    if passed[:5] == [1, 2, 3, 4, function] and passed[-1] in (mark, (mark,)):
        launch, (x, y, z), constants = launcher.launch, grid, passed[5:-1]
        if passed[-1] is mark:  # Triton 3.6 takes arguments one by one, not as a tuple
            return lambda stream, addresses: launch(
                x, y, z, stream, function, *constants, *addresses, *numbers
            )
        return lambda stream, addresses: launch(
            x, y, z, stream, function, *constants, (*addresses, *numbers)
        )
    constants = function, metadata, None, None, None
    return lambda stream, addresses: launcher(*grid, stream, *constants, *addresses, *numbers)


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Collect the launches of all threads, including those with fake and meta tensors."""
    record: list[Launch] = []
    _records.append(record)
    try:
        yield record
    finally:  # threads may end in another order than they began
        _records[:] = [other for other in _records if other is not record]
