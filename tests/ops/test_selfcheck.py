"""Kernels that are wrong, slow or cannot be launched are not used; right ones are remembered."""

import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ops.kernels import DEVICE, large_tiles, poisoned_memory  # noqa: F401
from tresnet.ops import dispatch, selfcheck
from tresnet.ops.abn import launch
from tresnet.ops.blur_pool import launch as blur_launch
from tresnet.ops.space_to_depth import launch as stem_launch


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def changed(module: Any, name: str, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    """What makes a launch of a module return something else."""
    original = getattr(module, name)
    return lambda patch: patch.setattr(module, name, lambda *args: change(original(*args)))


def test_right_kernels_are_checked_once_and_remembered(cache, monkeypatch):
    began_s = time.process_time()
    assert selfcheck.failure(torch.device(DEVICE)) is None
    assert time.process_time() - began_s < 10
    assert len(list((cache / "tresnet").iterdir())) == 1
    monkeypatch.setattr(selfcheck, "check", lambda device: pytest.fail("checked again"))
    assert selfcheck.failure(torch.device(DEVICE)) is None


WRONG = {
    "output": changed(launch, "apply", lambda f: (f[0] * 1.1, f[1])),
    "bits": changed(launch, "apply", lambda f: (f[0], 255 - f[1])),
    "statistics": changed(launch, "statistics", lambda found: (found[0] * 1.1, found[1])),
    "running statistics": changed(launch, "running_statistics", lambda y: y + 0.1),
    "squeeze": changed(launch, "squeeze", lambda y: y + 1),
    "gradient of x": changed(launch, "grad_apply", lambda y: y + 0.1),
    "masked gradient or input again": changed(launch, "grad_sums", lambda f: (f[0], f[1] + 0.1)),
    "gradients of vectors": changed(launch, "merge_grad_sums", lambda y: y * 1.1),
    "values that are not written": changed(launch, "apply", lambda f: (f[0] * math.nan, f[1])),
    "blur": changed(blur_launch, "blur", lambda y: y * 1.1),
    "transposed blur": changed(blur_launch, "transposed_blur", lambda y: y * 1.1),
    "stem": changed(stem_launch, "stem_input", lambda y: y * 1.1),
}


# One of each file of kernels, and of each kind of fault; the others are as slow and found alike.
FEW = ("output", "bits", "gradient of x", "values that are not written", "blur", "stem")


@pytest.mark.parametrize(
    "what", [what if what in FEW else pytest.param(what, marks=pytest.mark.slow) for what in WRONG]
)
def test_a_wrong_kernel_is_found(what, cache, monkeypatch):
    WRONG[what](monkeypatch)
    with pytest.warns(UserWarning, match=r"ArithmeticError: .*off by .*runs plain PyTorch there"):
        reason = selfcheck.failure(torch.device(DEVICE))
    assert reason is not None
    assert not (cache / "tresnet").exists(), "asked again next time"


def test_kernels_that_cannot_be_launched_or_hang_are_not_used(monkeypatch):
    def missing(*args):
        raise RuntimeError("Cannot find ptxas")

    with monkeypatch.context() as patch:
        patch.setattr(launch, "statistics", missing)
        with pytest.warns(UserWarning, match="RuntimeError: Cannot find ptxas"):
            assert selfcheck.failure(torch.device(DEVICE))
    monkeypatch.setattr(selfcheck, "LIMIT_S", 0.2)
    monkeypatch.setattr(selfcheck, "check", lambda device: time.sleep(1))
    with pytest.warns(UserWarning, match="not finished after 0 s"):
        assert selfcheck.failure(torch.device(DEVICE))


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU is pretended")
def test_a_gpu_with_wrong_kernels_runs_plain_operators_and_says_so_once(monkeypatch):
    with torch._subclasses.FakeTensorMode():
        # before one seems to be there: torch 2.11 would initialise it
        x = torch.empty(2, 3, 4, 4, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(dispatch, "_capability", lambda index: (9, 0))
    monkeypatch.setattr(dispatch, "_found", {})
    assert dispatch.runs_kernels(x, "auto"), "nothing known yet"
    with pytest.warns(UserWarning, match="impl='auto' runs plain PyTorch there"):
        dispatch.lacking(torch.device("cuda", 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not dispatch.runs_kernels(x, "auto")
