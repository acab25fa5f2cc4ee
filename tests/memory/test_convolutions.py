"""The convolutions of a step, collected from its trace and run one by one."""

import pytest
import torch
from torch import nn

from tresnet.errors import InputError
from tresnet.memory import Workspaces
from tresnet.memory.convolutions import collect, cuda_meter, measure_all, summarise
from tresnet.memory.device import GENERIC, MIB
from tresnet.memory.plan import make_plan
from tresnet.memory.prediction import record


class Two(nn.Module):
    """The same convolution twice and one grouped, strided, dilated one with a bias."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.c = nn.Conv2d(8, 4, 3, stride=2, dilation=2, groups=2)

    def forward(self, x):
        return self.c(self.b(self.a(x).relu())).mean((2, 3))


def found(model, **step):
    _, model, plan = make_plan(model, **{"batch_size": 2, "input_size": (8, 16, 16), **step})
    return plan, collect(model, plan)


def test_every_distinct_convolution_is_found_once():
    # the gradient of the first one's input is not wanted, so it has a backward of its own
    assert set(found(Two())[1]) == {
        "y float32 first 2x8x16x16 8x8x3x3 1x1 1x1 1x1 1",
        "y float32 first 2x8x16x16 4x4x3x3 2x2 0x0 2x2 2",
        "xwb float32 first 2x8x16x16 4x4x3x3 2x2 0x0 2x2 2",
        "xw float32 first 2x8x16x16 8x8x3x3 1x1 1x1 1x1 1",
        "w float32 first 2x8x16x16 8x8x3x3 1x1 1x1 1x1 1",
    }


@pytest.mark.parametrize("step", [{"amp": "bf16", "channels_last": True}, {"train": False}])
def test_a_table_of_them_answers_for_the_whole_step(step):
    """Every convolution that a prediction looks up has been collected under the same key."""
    _, model, plan = make_plan("tresnet_t", batch_size=4, layers=(1, 1, 1, 1), **step)
    table, left = measure_all(collect(model, plan).values(), lambda c: 3 * MIB, time_limit_s=60)
    assert left == {}
    trace = record(model, plan, GENERIC, Workspaces(table))
    convolutions = [o for o in trace.operations if o.name.startswith("aten.convolution")]
    borrowed = [b.n_bytes for b in trace.buffers if b.n_bytes == 3 * MIB]
    assert len(borrowed) == len(convolutions) > 10
    assert all(o.workspace_high_bytes == 0 for o in convolutions)


@pytest.mark.parametrize("step", [{}, {"amp": "bf16", "channels_last": True}])
def test_they_run_for_real_and_give_what_autograd_gives(step):
    """On the CPU: the forms, layouts and parameters make valid calls of the right result sizes."""
    for convolution in found(Two(), **step)[1].values():
        result = convolution.prepare("cpu")()
        which, dtype, layout, x_shape, w_shape = convolution.key.split()[:5]
        outputs = result if isinstance(result, tuple) else (result,)
        shapes = ["x".join(map(str, t.shape)) if t is not None else None for t in outputs]
        if which != "y":
            assert shapes[0] == (x_shape if "x" in which else None)
            assert shapes[1] == w_shape
            assert (shapes[2] is not None) == ("b" in which)
        tensors = [t for t in outputs if t is not None]
        assert all(str(t.dtype) == f"torch.{dtype}" for t in tensors)
        assert layout == ("last" if step.get("channels_last") else "first")


def test_failures_and_the_end_of_time_are_kept_apart(monkeypatch):
    convolutions = list(found(Two())[1].values())
    now, asked = [0.0], []
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def meter(convolution):
        asked.append(convolution.key)
        now[0] += 1
        if len(asked) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")
        return 100 * len(asked)

    table, left = measure_all(convolutions, meter, time_limit_s=3)
    keys = [c.key for c in convolutions]
    assert table == {keys[0]: 100, keys[2]: 300}
    assert left == {
        keys[1]: "CUDA out of memory.",
        keys[3]: "no time was left",
        keys[4]: "no time was left",
    }


def test_summary_names_the_largest():
    assert summarise({"a": 0}) == "1 convolutions measured, 0 borrow memory"
    assert summarise({"a": 0, "b": MIB, "c": 2 * MIB}).endswith(
        "2 borrow memory, at most 2.0 MiB: c"
    )


def test_the_meter_needs_a_gpu(monkeypatch):
    with pytest.raises(InputError, match=r"expected a GPU to measure .*got device cpu"):
        cuda_meter(torch.device("cpu"), benchmark=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match=r"expected a GPU to measure .*found none"):
        cuda_meter(torch.device("cuda"), benchmark=False)


def test_the_meter_reads_the_peak_beyond_inputs_and_outputs(monkeypatch):
    """With an allocator that is told what a run does: outputs of 10 MiB, 7 MiB borrowed."""
    held, peak = {"n": 100 * MIB}, {"n": 0}

    class Run:
        key = "fake"

        def prepare(self, device):
            def run():
                peak["n"] = held["n"] + (10 + 7) * MIB
                held["n"] += 10 * MIB
                return Outputs()

            return run

    class Outputs:
        def __del__(self):
            held["n"] -= 10 * MIB

    class Device:
        type = "cuda"

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: held["n"])
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device: peak["n"])
    assert cuda_meter(Device(), benchmark=True)(Run()) == 7 * MIB
    assert held["n"] == 100 * MIB
    assert not torch.backends.cudnn.benchmark


@pytest.mark.gpu
def test_a_gpu_says_what_cudnn_borrows():
    convolutions = collect(*make_plan("torchvision:vgg16_bn", batch_size=8)[1:]).values()
    table, left = measure_all(
        convolutions, cuda_meter(torch.device("cuda"), benchmark=False), time_limit_s=300
    )
    assert left == {}
    assert min(table.values()) >= 0
    assert max(table.values()) > 0
