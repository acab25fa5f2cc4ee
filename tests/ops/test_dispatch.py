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


def test_fake_tensors_leave_the_gpu_alone_and_go_by_what_was_found(gpu, monkeypatch):
    """A prediction of memory, perhaps for another GPU than the one that is there."""
    monkeypatch.setattr(dispatch, "_capability", lambda index: (7, 5))
    assert dispatch.runs_kernels(gpu, torch.float16, "auto", fake=True)
    with pytest.warns(UserWarning, match="cuda:0 runs plain PyTorch: .* needs a GPU of compute"):
        assert dispatch.lacking(gpu) is not None
    assert not dispatch.runs_kernels(gpu, torch.float16, "auto", fake=True)


@pytest.mark.parametrize("lacks", ["_has_triton", "_has_compiler"])
def test_a_gpu_without_kernels_is_said_to_run_plain_pytorch_once(gpu, lacks, monkeypatch):
    monkeypatch.setattr(dispatch, lacks, lambda: False)
    with pytest.warns(UserWarning, match="cuda:0 runs plain PyTorch: .* needs (a C|the triton)"):
        assert not dispatch.runs_kernels(gpu, torch.float16, "auto")
    assert not dispatch.runs_kernels(gpu, torch.float16, "auto")
