"""A canary for each patch of torch: that torch still needs it, and still heeds it.

Where one of these fails, torch has changed: see whether the patch can go, or where it belongs now.
"""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.autograd import Function
from torch.multiprocessing.reductions import StorageWeakRef

from tests.operators import Recorder
from tresnet.memory import patches

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or not torch.backends.cuda.is_built(),
    reason="needs a torch built with CUDA on a machine without a GPU",
)


@pytest.fixture
def mode():
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        yield fakes


def attention():
    q = torch.empty(2, 4, 16, 32, device="cuda", dtype=torch.bfloat16)
    with Recorder() as seen:
        nn.functional.scaled_dot_product_attention(q, q, q)
    return seen.names() == ["_scaled_dot_product_flash_attention"]


def autocast_and_scaler():
    with torch.autocast("cuda", torch.bfloat16):
        inside = torch.is_autocast_enabled("cuda")
    return inside, torch.GradScaler("cuda").is_enabled()


def bfloat16_convolution():
    form = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.empty(2, 8, 8, 8, **form).to(memory_format=torch.channels_last)
    y = nn.functional.conv2d(x, torch.empty(8, 8, 3, 3, **form))
    return y.is_contiguous(memory_format=torch.channels_last)


def attention_layer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, device="cuda").eval()
    with torch.no_grad(), Recorder() as seen:
        layer(torch.ones(1, 4, 8, device="cuda"))
    return "_transformer_encoder_layer_fwd" in seen.names()


def optimizer():
    parameter = nn.Parameter(torch.empty(4, device="cuda"))
    parameter.grad = torch.empty(4, device="cuda")
    optimizer = torch.optim.Adagrad([parameter], lr=0.1)
    with Recorder() as seen:
        optimizer.step()
    return any("foreach" in name for name in seen.names())


def copied_fake():
    model = nn.Linear(2, 2, device="cuda")
    weight = copy.deepcopy(model).weight
    assert weight.untyped_storage()._cdata != model.weight.untyped_storage()._cdata
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    return weight.fake_mode is model.weight.fake_mode


def converted_modules():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    alive = [p.view(-1) for p in model.parameters()]  # as the fake mode's own views do
    model.to("cuda", torch.bfloat16)
    del alive
    devices = {t.device.type for t in (*model.parameters(), *model.buffers())}
    return devices, {(isinstance(p, nn.Parameter), p.dtype) for p in model.parameters()}


class Counting(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        self.steps += 1


def scaled_update():
    with patches.autocast_without_gpu(), patches.foreach_optimizers():
        scaler, parameter = torch.GradScaler("cuda"), nn.Parameter(torch.empty(4, device="cuda"))
        optimizer = Counting([parameter], lr=0.1)
        parameter.grad = scaler.scale(torch.empty(4, device="cuda"))
        scaler.step(optimizer)
        return optimizer.steps


class KeepsUnset(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def unset_gradients():
    return patches.wants_zeros(KeepsUnset.apply(torch.ones(2, requires_grad=True)).grad_fn)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.filterwarnings("ignore:CUDA is not available or torch_xla is imported")
@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled")
@pytest.mark.parametrize(
    ("patch", "probe", "without", "patched"),
    [
        (patches.attention_on_gpu_kernels, attention, False, True),
        (patches.autocast_without_gpu, autocast_and_scaler, (False, False), (True, True)),
        (patches.bfloat16_convolutions_on_cudnn, bfloat16_convolution, False, True),
        (patches.attention_fastpath_off, attention_layer, True, False),
        (patches.foreach_optimizers, optimizer, False, True),
        (
            *(patches.fake_modules_converted, converted_modules, "RuntimeError"),
            ({"cuda"}, {(True, torch.bfloat16)}),
        ),
        (patches.fake_tensors_deepcopied, copied_fake, False, True),
        (
            patches.generators_on_cpu,
            lambda: torch.Generator("cuda").device.type,
            *("RuntimeError", "cpu"),
        ),
        (
            patches.properties_without_gpu,
            lambda: torch.cuda.get_device_properties("cuda").major,
            *("RuntimeError", 8),
        ),
        (patches.scaler_always_steps, scaled_update, "RuntimeError", 1),
        (patches.materialize_grads_stored, unset_gradients, True, False),
        (patches.graph_task, lambda: torch._C._current_graph_task_id() == -1, True, False),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_torch_needs_the_patch_and_heeds_it(mode, patch, probe, without, patched):
    def result():
        try:
            return probe()
        except (RuntimeError, DataDependentOutputException):
            return "RuntimeError"

    assert result() == without
    with patch():
        assert result() == patched
    assert result() == without


def test_each_backward_is_a_graph_task_of_its_own():
    with patches.graph_task():
        first = torch._C._current_graph_task_id()
    with patches.graph_task():
        assert torch._C._current_graph_task_id() != first


def test_saved_tensors_let_go():
    """A node asks that they go where they are read last; the engine keeps those of a kept graph."""
    survived, asked = [], []

    class Reads(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x * 1)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            (saved,) = ctx.saved_tensors
            storage = StorageWeakRef(saved.untyped_storage())
            ctx.maybe_clear_saved_tensors()
            del saved
            survived.append(not storage.expired())
            return grad

    y = Reads.apply(torch.ones(2, requires_grad=True)).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert survived == [True, False]
    y = Reads.apply(torch.ones(2, requires_grad=True))
    with patches.saved_tensors_released(lambda: asked.append(True)):
        y.grad_fn.apply(torch.ones(2))
    assert (survived[2:], asked) == ([True], [True])
