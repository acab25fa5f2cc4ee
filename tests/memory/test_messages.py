"""Test the error messages of memory predictions for invalid input."""

import logging
from math import nan

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.toys import mean
from tresnet.errors import InputError, TResNetError, WriteError
from tresnet.memory import max_batch, predict
from tresnet.memory.device import GENERIC
from tresnet.memory.snapshot import write_snapshot


def conv(then):
    """Return a convolution whose output goes through `then`."""
    model = nn.Conv2d(3, 3, 1)
    model.register_forward_hook(lambda module, args, y: then(y))
    return model


class FailingSgd(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("no driver")


def on_a_gpu():
    model = nn.Linear(2, 2)
    with FakeTensorMode():
        model.weight = nn.Parameter(torch.empty(2, 2, device="cuda:0"))
    return model


def uncopyable():
    model = nn.Linear(2, 2)
    model.lock = (n for n in range(3))
    return model


@pytest.fixture
def opaque():
    """An operator without a kernel for fake tensors."""
    with torch.library._scoped_library("tresnet_tests", "DEF") as library:
        library.define("opaque(Tensor x) -> Tensor")
        library.impl("opaque", lambda x: x.clone(), "CPU")
        yield


WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
SIZE, RESNET = {"input_size": 8}, "timm:resnet18"


@pytest.mark.usefixtures("opaque")
@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        *(
            ("tresnet_t", settings, message)
            for settings, message in (
                ({"batch_size": 0}, "^batch_size: expected at least 1, got 0"),
                *(
                    ({"gpu_memory": n}, "expected a size such as '80GiB'")
                    for n in ("80 gigs", nan, "9" * 400)
                ),
                ({"ema_decay": 1}, "^ema_decay: expected less than 1, got 1"),
                ({"amp": None}, "^amp: expected 'auto', 'off', 'bf16' or 'fp16', got None"),
                ({"opt": 3}, "opt: expected a valid string, got 3"),
                ({"opt": FailingSgd}, "failingsgd failed on fake tensors after .*: no driver"),
                ({"dtype": "bf16"}, "no dtype for tresnet_t, got 'bf16': it is for inference"),
                ({"train": False, "ema_decay": 0.9}, "no ema_decay .*: it is for training"),
                ({"device": "gtx1"}, "unknown GPU 'gtx1': expected one of a100"),
                ({"grad_checkpointing": "layer1"}, "grad_checkpointing: expected a valid boolean"),
                ({"input_size": (4, 32, 32)}, "expected 3 channels, got 4"),
            )
        ),
        ("tresnet_q", {}, "unknown model 'tresnet_q': did you mean .*timm:NAME and torch"),
        (3, {}, "expected a model's name, a torch.nn.Module or a function"),
        (lambda: 3, {}, "expected a model's name, a torch.nn.Module or a function .*, got int"),
        (nn.Identity(), {}, "expected a model with parameters to train"),
        (nn.Sequential(nn.LSTM(8, 2)), {}, "without recurrent layers, got LSTM at 0: cuDNN's mem"),
        (nn.Embedding(8, 2), {}, "aten.embedding .*the model, which must take a batch of images$"),
        (nn.Sequential(nn.LazyLinear(3)), {}, "uninitialised ones in Sequential"),
        (nn.DataParallel(nn.Linear(2, 2)), {}, "wrapped in DataParallel: pass model.module"),
        (torch.compile(nn.Linear(2, 2)), {}, "got a compiled model: pass the model before"),
        (torch.jit.script(nn.Linear(2, 2)), {}, "got a TorchScript model: pass the model before"),
        (nn.Linear(2, 2), {"num_classes": 3}, "got num_classes: give these options to the"),
        (nn.Linear(2, 2), {"grad_checkpointing": True}, "set up .*no attribute 'set_grad_ch"),
        (nn.Linear(8, 2), {"compile": "default"}, "compile: expected none, got default"),
        (nn.Linear(8, 2), {"cuda_graph": "on"}, "cuda_graph: expected off or auto, got on"),
        (on_a_gpu(), {}, "CPU or the meta device, got a model on cuda:0"),
        (uncopyable(), {}, r"Linear cannot be copied.*pass a function that builds the model"),
        (conv(lambda y: y if y.max() > 0 else -y), SIZE, "depends on the values of .*y.max.. > 0"),
        (conv(torch.nonzero), SIZE, "aten.nonzero.*depends on the values of a tensor"),
        (
            conv(lambda y: torch.ops.tresnet_tests.opaque(y)),
            *(SIZE, r"tresnet_tests.opaque cannot run on fake tensors.*register_fake"),
        ),
        (RESNET, {"input_size": (4, 8, 8)}, "of 2 of 4x8x8 at aten.conv.* in conv1.*check input_"),
        pytest.param(
            conv(lambda _: torch.cuda.synchronize()),
            *(SIZE, "needs a tensor's data or the GPU itself.*: replace this code"),
            marks=WITHOUT_GPU,
        ),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else str(v)[:24],
)
def test_what_cannot_be_predicted_is_explained(model, settings, message):
    with pytest.raises(TResNetError, match=message):
        predict(model, **{"batch_size": 2, **settings})


def test_the_in_place_package_is_named():
    """Refuse the inplace-abn package, whose functions cannot run on fake tensors."""
    pytest.importorskip("inplace_abn")
    with pytest.raises(InputError, match="such as norm='inplace_abn' by norm='abn'"):
        predict("tresnet_t", batch_size=4, norm="inplace_abn", amp="off")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda _: predict("tresnet_t"), TypeError, r"^predict\(\) missing .*'batch_size'$"),
        (
            lambda _: predict("tresnet_t", batch_size=1, batch=1),
            *(TypeError, r"^predict\(\) got an unexpected .*'batch'$"),
        ),
        (
            lambda _: max_batch("tresnet_t", device=GENERIC),
            *(InputError, r"give --gpu-memory 80GiB .*, or the GPU's name by --gpu"),
        ),
        (
            lambda _: max_batch("tresnet_t", device="b200"),
            *(InputError, r"unknown GPU 'b200': .*or give only its memory"),
        ),
        (
            lambda folder: write_snapshot(
                predict(nn.Linear(4, 2), batch_size=2, input_size=(1, 1, 4), loss=mean),
                folder / "no" / "memory.pickle",
            ),
            *(WriteError, "no does not exist"),
        ),
    ],
)
def test_other_calls_are_explained(call, error, message, tmp_path):
    with pytest.raises(error, match=message):
        call(tmp_path)


def test_an_operation_that_rejects_its_input_logs_no_traceback(monkeypatch, caplog):
    log = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    with pytest.raises(InputError, match=r"same reduction dim.*check input_size and the model"):
        predict(nn.Linear(8, 2), batch_size=2, input_size=(1, 1, 4))
    assert not caplog.text
    assert not log.disabled
