"""Launches of Triton kernels.

The functions of each `launch.py` allocate results. They call `launch` with a `LaunchSpec` (kernel,
grid and scalars), and with tensors named as the kernel's arguments. For fake and meta tensors, no
kernel runs, so that `tresnet.memory` can predict memory by the same functions.
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
    """A kernel with its grid and scalar arguments, for maps of one shape, strides and dtype.

    All launches of a spec must agree in their tensors' dtypes and device, and in which tensors are
    None, because only the first launch reads these properties.

    Args:
        name: Module below `tresnet.ops` and name of the kernel, as in "abn.kernels.apply".
        warps: Number of warps of a Triton program.
        grid: Number of Triton programs along one or two axes.
        scalars: The kernel's arguments other than tensors, including constants. Names that the
            kernel does not have are ignored.
    """

    def __init__(self, name: str, warps: int, grid: tuple[int, ...], **scalars: Any) -> None:
        module, _, kernel = name.rpartition(".")
        # imported only here, because Triton may be absent and is slow to import
        self.kernel = getattr(importlib.import_module(f"tresnet.ops.{module}"), kernel)
        self.grid = (*grid, 1, 1)[:3]
        # Triton 3.9 warns unless enable_fp_fusion or TRITON_DEFAULT_FP_FUSION is set
        self.options = {"num_warps": warps, "enable_fp_fusion": True}
        self.scalars = {name: scalars[name] for name in self.kernel.arg_names if name in scalars}
        self.compiled: dict[Any, _Compiled] = {}  # `launch` computes the key
        self.dtypes: list[torch.dtype | None] | None = None


class Launch(NamedTuple):
    """A recorded launch; `arguments` has names and values in the order of the signature."""

    kernel: Any
    grid: tuple[int, ...]
    options: dict[str, Any]
    arguments: dict[str, Any]

    def constants(self) -> dict[str, Any]:
        """Return the arguments whose values are compiled into the kernel: `constexpr` and None."""
        # annotated arguments are `constexpr`; kernels of the interpreter have no list `constexprs`
        names, values = self.kernel.fn.__annotations__, self.arguments
        return {name: value for name, value in values.items() if name in names or value is None}

    def variant(self) -> tuple[Any, ...]:
        """Return a key of the compiled kernel: its name, dtypes and constants."""
        values = self.arguments.values()
        dtypes = tuple(x.dtype if isinstance(x, Tensor) else None for x in values)
        return self.kernel.__name__, dtypes, tuple(sorted(self.constants().items(), key=str))


class _Compiled(NamedTuple):
    kernel: Any  # compiled by Triton; `kernel[grid](...)` calls Triton's hooks
    device: int
    run: Callable[[int, list[int]], object]  # takes a stream and tensors' addresses
    driver: Any
    enter_hooks: list[Any]  # lists of Triton, to which Triton's profiler adds hooks
    exit_hooks: list[Any]


_PLAIN = (Tensor, nn.Parameter)
_records: list[list[Launch]] = []  # one list for each active `recorded_launches`


def launch(spec: LaunchSpec, **tensors: Tensor | None) -> None:
    """Launch a Triton kernel; `tensors` are all its tensors, in the order of its arguments.

    A tensor may be None; the kernel is then compiled without that tensor. If the last tensor, an
    output, is a `FakeTensor`, no kernel is launched. Triton's own launcher takes several times as
    long as a direct launch of the compiled kernel. So Triton's launcher runs only at the first
    launch for each spec and each alignment of addresses. Later launches call the compiled kernel
    directly. The first launch raises `ValueError` if the tensors are on several devices.
    """
    for record in _records:
        record.append(Launch(spec.kernel, spec.grid, spec.options, tensors | spec.scalars))
    values = [*tensors.values()]
    if type(values[-1]) not in _PLAIN:
        return  # the output is a fake tensor; parameters among the inputs may be real
    # a compiled kernel ignores the address of a tensor that is None
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in values]
    # Triton compiles one kernel for addresses divisible by 16, and another for other addresses
    misaligned = reduce(or_, addresses) % 16 and tuple(a % 16 for a in addresses)
    compiled = spec.compiled.get(misaligned)
    if compiled is None:
        _launch_first(spec, misaligned, tensors)
        return
    kernel, device, run, driver, enter_hooks, exit_hooks = compiled
    if enter_hooks or exit_hooks or device != driver.get_current_device():
        with torch.cuda.device(device):
            kernel[spec.grid](*values, *spec.scalars.values())
    else:
        run(driver.get_current_stream(device), addresses)


def _launch_first(spec: LaunchSpec, misaligned: Any, tensors: dict[str, Tensor | None]) -> None:
    device, *others = {tensor.device for tensor in tensors.values() if tensor is not None}
    if others:
        raise ValueError(f"expected tensors on one device, got {device} and {others[0]}")
    if device.type == "meta":
        return
    # checked only at the first launch; later launches pass addresses without names or dtypes
    assert [*tensors, *spec.scalars] == [*spec.kernel.arg_names]
    dtypes = [None if tensor is None else tensor.dtype for tensor in tensors.values()]
    assert spec.dtypes in (None, dtypes), (spec.kernel, spec.dtypes, dtypes)
    spec.dtypes, index = dtypes, -1 if device.index is None else device.index
    with torch.cuda.device(index):  # Triton launches on the current device
        compiled = spec.kernel[spec.grid](**tensors, **spec.scalars, **spec.options)
    if compiled is None:  # Triton's interpreter compiles nothing
        return
    from triton import knobs
    from triton.runtime import driver

    run = _direct(compiled, spec.grid, tuple(spec.scalars.values()))
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    # a hook without the list `calls` may change unseen, so [hook] rules out direct launches
    calls = (getattr(hook, "calls", [hook]) for hook in hooks)
    spec.compiled[misaligned] = _Compiled(compiled, index, run, driver.active, *calls)


def _direct(
    compiled: Any, grid: tuple[int, ...], scalars: tuple[Any, ...]
) -> Callable[[int, list[int]], object]:
    """Return a function of a stream and tensors' addresses that launches a compiled kernel.

    On NVIDIA GPUs, the function bypasses the Python code of Triton's launcher, unless the kernel
    needs scratch memory. That code adds constant arguments, recorded by one call to a stub.
    """
    launcher, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    recorded, sentinel = list[Any](), object()
    if getattr(launcher, "global_scratch_size", 1) == 0 == launcher.profile_scratch_size:
        recorder = copy.copy(launcher)
        recorder.launch = lambda *args: recorded.extend(args)
        recorder(1, 2, 3, 4, function, metadata, None, None, None, sentinel)
    if recorded[:5] == [1, 2, 3, 4, function] and recorded[-1] in (sentinel, (sentinel,)):
        launch, (x, y, z), constants = launcher.launch, grid, recorded[5:-1]
        if recorded[-1] is sentinel:  # Triton 3.6 takes arguments one by one, not as a tuple
            return lambda stream, addresses: launch(
                x, y, z, stream, function, *constants, *addresses, *scalars
            )
        return lambda stream, addresses: launch(
            x, y, z, stream, function, *constants, (*addresses, *scalars)
        )
    constants = function, metadata, None, None, None
    return lambda stream, addresses: launcher(*grid, stream, *constants, *addresses, *scalars)


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Record launches of all threads in a list, including launches with fake and meta tensors."""
    record: list[Launch] = []
    _records.append(record)
    try:
        yield record
    finally:  # other threads may still record
        _records[:] = [other for other in _records if other is not record]
