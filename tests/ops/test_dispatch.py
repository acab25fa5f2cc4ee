"""Choice of the implementation on machines that lack something."""

import re
from contextlib import nullcontext
from contextvars import ContextVar

import pytest
import torch

from tresnet.ops import dispatch
from tresnet.ops.autocast import autocast_dtype, autocast_off


def test_autocast_is_kept_out_where_it_is():
    x = torch.ones(2, 2)
    assert autocast_dtype("cpu") is autocast_dtype("meta") is None
    assert isinstance(autocast_off("cpu"), nullcontext)
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_dtype("cpu") is (x @ x).dtype is torch.bfloat16
        with autocast_off("cpu"):
            assert (x @ x).dtype is torch.float32


GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "dtype", "lacks", "of_real", "of_fake"),
    [
        (GPU, torch.float16, {}, None, None),
        (GPU, torch.bfloat16, {"_has_triton": False}, "the triton package", "the triton package"),
        (GPU, torch.float32, {"_has_compiler": False}, "a C compiler", "a C compiler"),
        (GPU, torch.float16, {"_capability": (7, 5)}, "capability 8.0", "capability 8.0"),
        (GPU, torch.float64, {}, "got torch.float64", "got torch.float64"),
        (CPU, torch.float32, {}, None, None),  # by the interpreter
        (CPU, torch.float32, {"_has_compiler": False, "_capability": (7, 5)}, None, None),
        (CPU, torch.float32, {"interpreted": False}, "got one on cpu", "got one on cpu"),
        (CPU, torch.float64, {}, "got torch.float64", "got torch.float64"),
        # the GPU that a prediction assumes
        (GPU, torch.float16, {"assumed": (7, 0)}, None, "capability 8.0"),
        (GPU, torch.float16, {"assumed": (9, 0), "_capability": (7, 5)}, "capability 8.0", None),
        (GPU, torch.float16, {"assumed": (9, 0), "_has_compiler": False}, "a C c", "a C compiler"),
        (GPU, torch.float16, {"assumed": (7, 0), "gpu": False}, None, "capability 8.0"),
        # a fake GPU that this machine lacks counts as a recent one
        (GPU, torch.float16, {"gpu": False, "_has_compiler": False, "_capability": (7, 5)},
         "a C compiler|capability", None),
        (GPU, torch.float16, {"gpu": False, "_has_triton": False}, "the triton", "the triton"),
        (torch.device("meta"), torch.float32, {"interpreted": False}, "got one on meta", "meta"),
    ],
)  # fmt: skip
def test_one_function_says_what_kernels_lack(device, dtype, lacks, of_real, of_fake, monkeypatch):
    """Real tensors and predictions' fake ones get the same answer where there is a GPU."""
    present = {"gpu": True, "interpreted": True, "_has_triton": True, "_has_compiler": True}
    monkeypatch.setattr(dispatch, "fake_capability", ContextVar("assumed"))
    dispatch.fake_capability.set(lacks.get("assumed"))
    for name, value in ({**present, "_capability": (8, 0)} | lacks).items():
        if name == "assumed":
            continue
        owner, name = (torch.cuda, "is_available") if name == "gpu" else (dispatch, name)
        monkeypatch.setattr(owner, name, lambda *_, value=value: value)
    for fake, expected in ((False, of_real), (True, of_fake)):
        reason = dispatch.obstacle(device, dtype, fake)
        if expected is None:
            assert reason is None
        else:
            assert re.search(expected, reason)
