"""A kernel is compiled by Triton, and launched again without it where it would be the same one."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from tresnet.ops import operators

triton = pytest.importorskip("triton")
GRID = (5, 1, 1)


class Kernel:
    """In place of Triton's functions; its compiled kernels are mocks."""

    def __init__(self):
        self.compiled = []

    def __getitem__(self, grid):
        def compile_and_launch(*args, num_warps, enable_fp_fusion):
            assert (grid, num_warps, enable_fp_fusion) == (GRID, 4, True)
            self.compiled.append((MagicMock(function=7, packed_metadata="packed"), args))
            return self.compiled[-1][0]

        return compile_and_launch


@pytest.fixture
def kernel(monkeypatch):
    device = SimpleNamespace(get_current_device=lambda: -1, get_current_stream=lambda _: 3)
    monkeypatch.setattr(triton.runtime.driver, "_active", device)
    monkeypatch.setattr(operators, "_compiled", {})
    return Kernel()


def launch(kernel, *tensors, numbers=(6, 0.5)):
    operators.launch(kernel, GRID, 4, tensors, numbers)


def test_a_kernel_is_launched_again_by_addresses(kernel):
    for _ in range(3):
        x, y = torch.zeros(8), torch.zeros(4)
        launch(kernel, x, y)
    ((made, args),) = kernel.compiled
    assert args[2:] == (6, 0.5)
    assert made.run.call_count == 2
    made.run.assert_called_with(
        *GRID, 3, 7, "packed", None, None, None, x.data_ptr(), y.data_ptr(), 6, 0.5
    )


@pytest.mark.parametrize(
    "other",
    [
        lambda kernel: launch(kernel, torch.zeros(8), torch.zeros(4, dtype=torch.float16)),
        lambda kernel: launch(kernel, torch.zeros(9)[1:], torch.zeros(4)),
        lambda kernel: launch(kernel, torch.zeros(8), torch.zeros(5)[1:]),
        lambda kernel: launch(kernel, torch.zeros(8), torch.zeros(4), numbers=(7, 0.5)),
    ],
    ids=["dtype", "first alignment", "second alignment", "number"],
)
def test_what_triton_would_compile_anew_is_compiled_anew(kernel, other):
    launch(kernel, torch.zeros(8), torch.zeros(4))
    for _ in range(2):
        other(kernel)
    assert [made.run.call_count for made, _ in kernel.compiled] == [0, 1]
    launch(kernel, torch.zeros(8), torch.zeros(4))
    assert [made.run.call_count for made, _ in kernel.compiled] == [1, 1], "still known"


@pytest.mark.parametrize("when", ["hooks", "another device"])
def test_hooks_and_other_devices_are_left_to_triton(kernel, monkeypatch, when):
    launch(kernel, x := torch.zeros(8))
    if when == "hooks":
        hooks = triton.knobs.HookChain()
        hooks.add(print)
        monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", hooks)
    else:
        triton.runtime.driver.active.get_current_device = lambda: 1
    launch(kernel, x)
    ((made, _),) = kernel.compiled
    assert made.run.call_count == 0
    made.__getitem__.assert_called_once_with(GRID)
    made.__getitem__.return_value.assert_called_once_with(x, 6, 0.5)


class Launcher:
    """In place of Triton's for NVIDIA's GPUs, of two versions."""

    def __init__(self, nested, scratch):
        self.global_scratch_size, self.profile_scratch_size, self.nested = scratch, 0, nested
        self.launch, self.calls = MagicMock(), 0

    def __call__(self, x, y, z, stream, function, metadata, *rest):
        *hooks, arg = rest
        self.calls += 1
        args = ((arg,),) if self.nested else (arg,)
        self.launch(x, y, z, stream, function, False, metadata, *hooks, *args)


@pytest.mark.parametrize("nested", [False, True])
def test_the_python_of_tritons_launcher_runs_once(nested):
    launcher = Launcher(nested, scratch=0)
    run = operators._run_of(SimpleNamespace(run=launcher, function=7, packed_metadata="packed"))
    launcher(5, 1, 1, 3, 7, "packed", None, None, None, 11)
    run(GRID, 3, (11,))
    assert launcher.calls == 1, "the last one was not its own"
    assert launcher.launch.call_count == 2, "that shows the constants launches nothing"
    assert launcher.launch.call_args_list[0] == launcher.launch.call_args_list[1]


def test_a_kernel_that_borrows_memory_goes_through_tritons_launcher():
    launcher = Launcher(True, scratch=16)
    run = operators._run_of(SimpleNamespace(run=launcher, function=7, packed_metadata="packed"))
    run(GRID, 3, (11,))
    assert launcher.calls == 1
