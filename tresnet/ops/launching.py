"""Launches of Triton kernels.

An operation allocates its results, and calls `launch` with a `LaunchSpec` (kernel, grid and
scalars), and with tensors named as the kernel's arguments. For fake and meta tensors, no
kernel runs, so that `tresnet.memory` can predict memory by the same functions.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class LaunchSpec:
    """A kernel with its grid and scalar arguments, for maps of one shape, strides and dtype.

    Args:
        name: Module below `tresnet.ops` and kernel, as in "epilogue.pointwise_kernels.apply".
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
        self.compiled: dict[Any, Any] = {}  # kernels that Triton compiled; `launch` makes the keys


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


_PLAIN = (Tensor, nn.Parameter)
_records: list[list[Launch]] = []  # one list for each active `recorded_launches`


def launch(spec: LaunchSpec, **tensors: Tensor | None) -> None:
    """Launch a Triton kernel; `tensors` are all its tensors, in the order of its arguments.

    A tensor may be None; the kernel is then compiled without that tensor. If the last tensor, an
    output, is a fake or meta tensor, no kernel is launched. Triton compiles a kernel for each
    combination of dtypes, of absent tensors, and of addresses that 16 divides. The search for the
    compiled kernel takes Triton several times as long as a launch, so it is done here.
    """
    for record in _records:
        record.append(Launch(spec.kernel, spec.grid, spec.options, tensors | spec.scalars))
    values = [*tensors.values()]
    out: Any = values[-1]
    if type(out) not in _PLAIN or out.is_meta:
        return  # parameters among the inputs may be real
    key = tuple([None if x is None else (x.dtype, x.data_ptr() % 16) for x in values])
    compiled = spec.compiled.get(key)
    with torch.cuda.device_of(out):  # Triton launches on the current device
        if compiled is None:  # or Triton's interpreter runs, and compiles nothing
            spec.compiled[key] = spec.kernel[spec.grid](**tensors, **spec.scalars, **spec.options)
        else:
            compiled[spec.grid](*values, *spec.scalars.values())


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Record launches of all threads in a list, including launches with fake and meta tensors."""
    record: list[Launch] = []
    _records.append(record)
    try:
        yield record
    finally:  # other threads may still record
        _records[:] = [other for other in _records if other is not record]
