"""Launches: what Triton compiles anew, the arguments it gets, and their records."""

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from tests.ops.operation import launch_all
from tresnet.ops import launching, stem_kernel
from tresnet.ops.epilogue import (
    blurred_kernels,
    excite_kernels,
    pointwise_kernels,
    statistics_kernels,
)

triton = pytest.importorskip("triton")


class Kernel:
    """Stand-in for a function of triton.jit, whose compiled kernels are mocks."""

    arg_names = ("x", "y", "N", "eps")

    def __init__(self):
        self.compiled = []

    def __getitem__(self, grid):
        def compile_and_launch(num_warps, enable_fp_fusion, **arguments):
            assert (grid, num_warps, enable_fp_fusion) == ((5, 1, 1), 4, True)
            assert [*arguments.items()][2:] == [("N", 6), ("eps", 0.5)]
            self.compiled.append(MagicMock())
            return self.compiled[-1]

        return compile_and_launch


def test_a_kernel_is_compiled_once_for_dtypes_absent_tensors_and_alignments(monkeypatch):
    module = SimpleNamespace(kernel=Kernel())
    monkeypatch.setitem(sys.modules, "tresnet.ops.stand_in", module)
    spec = launching.LaunchSpec("stand_in.kernel", 4, (5,), eps=0.5, unknown=1, N=6)
    whole = torch.zeros(9)
    cases = [
        (whole, whole), (whole[1:], whole), (whole, whole[1:]), (whole.double(), whole),
        (None, whole),
    ]  # fmt: skip
    for _ in range(3):
        for x, y in cases:
            launching.launch(spec, x=x, y=y)
    assert len(module.kernel.compiled) == len(cases)
    for (x, y), compiled in zip(cases, module.kernel.compiled, strict=True):
        compiled.__getitem__.assert_called_with((5, 1, 1))
        assert compiled.__getitem__.return_value.call_count == 2  # the first time, Triton does
        compiled.__getitem__.return_value.assert_called_with(x, y, 6, 0.5)


def test_records_of_two_threads_end_in_any_order():
    first, second = launching.recorded_launches(), launching.recorded_launches()
    record = first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert launching._records == record == []


def test_numbers_that_may_be_fractions_are_never_integers():
    """Triton would compile another kernel for each value of an integer."""
    x = torch.empty(2, 4, 6, 6, device="meta").to(memory_format=torch.channels_last)
    with launching.recorded_launches() as launches:
        launch_all(x, se=True, join=False, slope=1, eps=1)
    values = [
        one.arguments[name] for one in launches for name in ("eps", "slope", "count")
        if name in one.arguments
    ]  # fmt: skip
    assert {*map(type, values)} == {float}


def test_constants_are_those_that_triton_compiles_for():
    """Compare with `JITFunction.constexprs`, which functions of Triton's interpreter lack."""
    modules = blurred_kernels, excite_kernels, pointwise_kernels, statistics_kernels, stem_kernel
    values = [value for module in modules for value in vars(module).values()]
    functions = [value for value in values if hasattr(value, "arg_names")]
    assert len(functions) > 20
    for function in functions:
        compiled = triton.runtime.jit.JITFunction(function.fn)
        arguments = dict.fromkeys(function.arg_names, 1)
        expected = {function.arg_names[index] for index in compiled.constexprs}
        assert {*launching.Launch(function, (), {}, arguments).constants()} == expected
