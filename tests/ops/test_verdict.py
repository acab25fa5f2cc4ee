"""Verdicts on kernels: what makes one, what does not, and how far results may be off."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

from tresnet.errors import InputError
from tresnet.ops import verdict
from tresnet.ops.verdict import check_near

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_verdicts(monkeypatch):
    monkeypatch.setattr(verdict, "_verdicts", {})


@pytest.mark.parametrize(
    ("result", "expected", "right"),
    [
        ((1.0, 2.0), (1.0, 2.0001), True),
        ((1.0, 2.0), (1.001, 2.0), False),
        ((1.0, math.nan), (1.0, 2.0), False),
        ((1.0, math.inf), (1.0, 2.0), False),
        (((1.0, 2.0), (1e-3, 0.0)), ((1.0, 2.0), (1.1e-3, 0.0)), False),  # row by row
        (None, (1.0, 2.0), False),
        ((1.0, 2.0), None, True),
    ],
)
def test_the_norm_of_the_error_is_compared_with_the_norm_of_the_expected_value(
    result, expected, right
):
    parts = [(None if x is None else torch.tensor(x).double(),) for x in (result, expected)]
    message = "sum: (off by|a result is missing)"
    with nullcontext() if right else pytest.raises(ArithmeticError, match=message):
        check_near("sum", *parts, 1e-4)


@pytest.mark.parametrize("scale", [1e-7, 1e-6, 1e-5, 1.0])
def test_rounding_to_float16_is_near_at_any_size(scale):
    """Below 6e-5, float16 has steps of 6e-8."""
    torch.manual_seed(0)
    exact = torch.randn(999, dtype=torch.float64) * scale
    check_near("half", exact.half(), exact, 5e-3)
    with pytest.raises(ArithmeticError):
        check_near("half", 2 * exact.half() + 2e-7, exact, 5e-3)


def first_verdict(monkeypatch, error=None, capturing=False, broken=False):
    """Return the verdict on a GPU; without an `error`, nothing must be compared."""

    def compare():
        raise error or pytest.fail("compared")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(verdict, "_is_broken", lambda _: broken)
    return verdict.verdict("key", torch.device("cuda" if capturing else "cpu"), compare)


def test_nothing_is_compared_while_a_graph_is_captured(monkeypatch):
    assert first_verdict(monkeypatch, capturing=True) is None
    assert not verdict._verdicts


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_memory_that_is_short_makes_no_kernel_wrong(error, monkeypatch):
    assert first_verdict(monkeypatch, error) is None


def test_a_broken_context_is_an_error(monkeypatch):
    with pytest.raises(InputError, match=r"broken.* \(CUDA error\): .* impl='plain'"):
        first_verdict(monkeypatch, RuntimeError("CUDA error"), broken=True)


def test_first_uses_of_two_threads_take_turns():
    """A comparison changes flags of the whole process."""
    flags, running = torch.backends.cudnn.deterministic, []

    def compare():
        running.append(1)
        time.sleep(0.05)
        assert len(running) == 1
        running.clear()

    with ThreadPoolExecutor(2) as threads:
        verdicts = threads.map(lambda key: verdict.verdict(key, CPU, compare), range(4))
    assert [*verdicts] == [None] * 4
    assert torch.backends.cudnn.deterministic == flags
