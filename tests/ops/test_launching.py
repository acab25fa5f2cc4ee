"""A kernel is compiled by Triton, and launched again without it where it would be the same one."""

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from tresnet.ops import launching
from tresnet.ops.abn import backward_kernels, excite_kernels, kernels
from tresnet.ops.space_to_depth import kernels as stem_kernels

triton = pytest.importorskip("triton")
GRID = (5, 1, 1)


class Kernel:
    """Stand-in for a function of triton.jit, whose compiled kernels are mocks."""

    arg_names = ("x", "y", "N", "eps")

    def __init__(self):
        self.compiled = []

    def __getitem__(self, grid):
        def compile_and_launch(num_warps, enable_fp_fusion, **arguments):
            assert (grid, num_warps, enable_fp_fusion) == (GRID, 4, True)
            self.compiled.append((MagicMock(function=7, packed_metadata="packed"), arguments))
            return self.compiled[-1][0]

        return compile_and_launch


@pytest.fixture
def spec(monkeypatch):
    device = SimpleNamespace(get_current_device=lambda: -1, get_current_stream=lambda _: 3)
    monkeypatch.setattr(triton.runtime.driver, "_active", device)
    kernels = SimpleNamespace(kernel=Kernel())
    monkeypatch.setitem(sys.modules, "tresnet.ops.stand_in.kernels", kernels)
    monkeypatch.setitem(sys.modules, "tresnet.ops.stand_in", kernels)
    return launching.LaunchSpec("stand_in.kernel", 4, (5,), eps=0.5, unknown=1, N=6)


def test_a_kernel_is_launched_again_by_addresses(spec):
    for _ in range(3):
        x, y = torch.zeros(8), torch.zeros(4)
        launching.launch(spec, x=x, y=y)
    ((made, arguments),) = spec.kernel.compiled
    assert [*arguments.items()][2:] == [("N", 6), ("eps", 0.5)]
    assert made.run.call_count == 2
    made.run.assert_called_with(
        *GRID, 3, 7, "packed", None, None, None, x.data_ptr(), y.data_ptr(), 6, 0.5
    )


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(9)[1:], torch.zeros(4)),
        (torch.zeros(8), torch.zeros(5)[1:]),
    ],
    ids=["first alignment", "second alignment"],
)
def test_what_triton_would_compile_anew_is_compiled_anew(spec, other):
    x, y = torch.zeros(8), torch.zeros(4)
    launching.launch(spec, x=x, y=y)
    for _ in range(2):
        launching.launch(spec, **dict(zip("xy", other, strict=True)))
    assert [made.run.call_count for made, _ in spec.kernel.compiled] == [0, 1]
    launching.launch(spec, x=x, y=y)
    assert [made.run.call_count for made, _ in spec.kernel.compiled] == [1, 1], "still known"


def test_tensors_on_two_devices_are_an_error(spec):
    with pytest.raises(ValueError, match="on one device"):
        launching.launch(spec, x=torch.zeros(8), y=torch.zeros(4, device="meta"))


@pytest.mark.parametrize("when", ["hooks", "another device"])
def test_hooks_and_other_devices_are_left_to_triton(spec, monkeypatch, when):
    monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", hooks := triton.knobs.HookChain())
    launching.launch(spec, x=(x := torch.zeros(8)), y=x)
    if when == "hooks":
        hooks.add(print)
    else:
        triton.runtime.driver.active.get_current_device = lambda: 1
    launching.launch(spec, x=x, y=x)
    ((made, _),) = spec.kernel.compiled
    assert made.run.call_count == 0
    made.__getitem__.assert_called_once_with(GRID)
    made.__getitem__.return_value.assert_called_once_with(x, x, 6, 0.5)


def test_records_of_two_threads_end_in_any_order():
    first, second = launching.recorded_launches(), launching.recorded_launches()
    record = first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert launching._records == record == []


class Launcher:
    """Stand-in for Triton's launcher of CUDA kernels, as in two versions of Triton."""

    def __init__(self, nested, scratch):
        self.global_scratch_size, self.profile_scratch_size, self.nested = scratch, 0, nested
        self.launch, self.calls = MagicMock(), 0

    def __call__(self, x, y, z, stream, function, metadata, *rest):
        self.calls += 1
        hooks, args = rest[:3], (rest[3:],) if self.nested else rest[3:]
        self.launch(x, y, z, stream, function, False, metadata, *hooks, *args)


@pytest.mark.parametrize(("nested", "scratch"), [(False, 0), (True, 0), (True, 16)])
def test_the_python_of_tritons_launcher_runs_once_unless_a_kernel_borrows_memory(nested, scratch):
    launcher = Launcher(nested, scratch)
    compiled = SimpleNamespace(run=launcher, function=7, packed_metadata="packed")
    run = launching._direct(compiled, GRID, (0.5,))
    launcher(5, 1, 1, 3, 7, "packed", None, None, None, 11, 0.5)
    run(3, [11])
    assert launcher.calls == (2 if scratch else 1)
    first, again = launcher.launch.call_args_list  # which shows the constants launches nothing
    assert first == again


MODULES = kernels, backward_kernels, excite_kernels, stem_kernels
FUNCTIONS = {
    f"{module.__name__}.{name}": value
    for module in MODULES
    for name, value in vars(module).items()
    if hasattr(value, "arg_names") and value.fn.__module__ == module.__name__
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_constants_are_those_that_triton_compiles_for(name):
    """Compare with `JITFunction.constexprs`, which functions of Triton's interpreter lack."""
    function = FUNCTIONS[name]
    compiled = triton.runtime.jit.JITFunction(function.fn)
    arguments = dict.fromkeys(function.arg_names, 1)
    expected = {function.arg_names[index] for index in compiled.constexprs}
    assert {*launching.Launch(function, GRID, {}, arguments).constants()} == expected
