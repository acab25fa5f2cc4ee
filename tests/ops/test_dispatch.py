"""Choice of the implementation on machines that lack something."""

from contextlib import nullcontext

import pytest
import torch

from tresnet.ops import dispatch, selfcheck
from tresnet.ops.autocast import autocast_dtype, autocast_off


def test_autocast_is_kept_out_where_it_is():
    x = torch.ones(2, 2)
    assert autocast_dtype("cpu") is autocast_dtype("meta") is None
    assert isinstance(autocast_off("cpu"), nullcontext)
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_dtype("cpu") is (x @ x).dtype is torch.bfloat16
        with autocast_off("cpu"):
            assert (x @ x).dtype is torch.float32


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is not there, whose kernels fail their check."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(dispatch, "_capability", lambda index: (9, 0))
    monkeypatch.setattr(dispatch, "_found", {})
    monkeypatch.setattr(selfcheck, "failure", lambda device: "tried")
    return torch.device("cuda", 0)


def test_no_launch_is_tried_while_a_graph_is_captured(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert dispatch.lacking(gpu) is None


def test_wrong_kernels_are_not_used(gpu):
    """Fake tensors, perhaps for another GPU, leave it alone and go by what was found."""
    assert dispatch.runs_kernels(gpu, torch.float16, "auto", fake=True), "nothing known yet"
    assert dispatch.lacking(gpu) == "tried"
    assert not dispatch.runs_kernels(gpu, torch.float16, "auto", fake=True)


@pytest.mark.parametrize(
    ("lacks", "found", "needs"),
    [
        ("_has_triton", False, "the triton"),
        ("_has_compiler", False, "a C"),
        ("_capability", (7, 5), "a GPU of compute"),
    ],
)
def test_a_gpu_without_kernels_is_said_to_run_plain_pytorch_once(
    gpu, lacks, found, needs, monkeypatch
):
    monkeypatch.setattr(dispatch, lacks, lambda *_: found)
    with pytest.warns(UserWarning, match=f"cuda:0 runs plain PyTorch: .* needs {needs}"):
        assert not dispatch.runs_kernels(gpu, torch.float16, "auto")
    assert not dispatch.runs_kernels(gpu, torch.float16, "auto")
    assert not dispatch.runs_kernels(gpu, torch.float16, "auto", fake=True)
