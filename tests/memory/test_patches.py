"""A canary for each patch of torch: that torch still needs it, and still heeds it.

Where one of these fails, torch has changed: see whether the patch can go, or where it belongs now.
"""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
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


def test_attention(mode):
    q = torch.empty(2, 4, 16, 32, device="cuda", dtype=torch.bfloat16)

    def kernels():
        with Recorder() as seen:
            torch.nn.functional.scaled_dot_product_attention(q, q, q)
        return seen.names()

    assert not any("flash" in name for name in kernels())
    with patches.kernels_chosen_by_rule():
        assert kernels() == ["_scaled_dot_product_flash_attention"]
    assert not any("flash" in name for name in kernels())


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_recurrent_layers(mode):
    def weights():
        layer = nn.LSTM(2, 2, device="cuda")
        return len({w.untyped_storage()._cdata for w in layer.parameters()}), layer

    n, layer = weights()
    assert n == 4  # PyTorch leaves weights apart where it cannot ask cuDNN
    with pytest.raises(RuntimeError, match="CUDA"):
        layer(torch.empty(2, 1, 2, device="cuda"))
    with patches.kernels_chosen_by_rule(), patches.recurrent_weights_flattened():
        n, layer = weights()
        assert n == 1
        assert layer.weight_hh_l0.shape == (8, 2)
        with Recorder() as seen:
            layer(torch.empty(2, 1, 2, device="cuda"))
    assert "_cudnn_rnn" in seen.names()
    assert layer.flatten_parameters.__module__ == "torch.nn.modules.rnn"


@pytest.mark.filterwarnings("ignore:CUDA is not available or torch_xla is imported")
@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled")
def test_autocast_and_scaler():
    def on():
        with torch.autocast("cuda", torch.bfloat16):
            inside = torch.is_autocast_enabled("cuda")
        return inside, torch.GradScaler("cuda").is_enabled()

    assert on() == (False, False)
    with patches.autocast_without_gpu():
        assert on() == (True, True)
    assert on() == (False, False)


def test_bfloat16_convolutions(mode):
    x = torch.empty(2, 8, 8, 8, device="cuda", dtype=torch.bfloat16)
    x = x.to(memory_format=torch.channels_last)
    weight = torch.empty(8, 8, 3, 3, device="cuda", dtype=torch.bfloat16)

    def stays_channels_last():
        y = torch.nn.functional.conv2d(x, weight)
        return y.is_contiguous(memory_format=torch.channels_last)

    assert not stays_channels_last()
    with patches.bfloat16_convolutions_on_cudnn():
        assert stays_channels_last()


def test_attention_layers():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()

    def kernels():
        with torch.no_grad(), Recorder() as seen:
            layer(torch.ones(1, 4, 8))
        return seen.names()

    assert "_transformer_encoder_layer_fwd" in kernels()
    with patches.attention_layers_in_pieces():
        assert "_transformer_encoder_layer_fwd" not in kernels()


def test_foreach_optimizers(mode):
    def kernels():
        parameter = nn.Parameter(torch.empty(4, device="cuda"))
        parameter.grad = torch.empty(4, device="cuda")
        optimizer = torch.optim.Adagrad([parameter], lr=0.1)
        with Recorder() as seen:
            optimizer.step()
        return seen.names()

    assert not any("foreach" in name for name in kernels())
    with patches.foreach_optimizers():
        assert any("foreach" in name for name in kernels())


def test_modules_converted():
    def build():
        layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
        layers[1].weight = layers[0].weight
        return layers

    with FakeTensorMode():
        model = build()
        alive = [p.view(-1) for p in model.parameters()]  # as the fake mode's own views do
        with pytest.raises(RuntimeError, match="Couldn't swap"):
            model.to("cuda")
        del alive
        with patches.modules_converted():
            model = build().to("cuda", torch.bfloat16)
        tensors = [*model.parameters(), *model.buffers()]
        assert {t.device.type for t in tensors} == {"cuda"}
        assert {t.dtype for t in model.parameters()} == {torch.bfloat16}
        assert model[1].weight is model[0].weight
        assert isinstance(model[0].weight, nn.Parameter)


def test_fakes_deepcopied(mode):
    model = nn.Linear(2, 2, device="cuda")
    with patches.fakes_deepcopied():
        copied = copy.deepcopy(model)
    assert copied.weight.untyped_storage()._cdata != model.weight.untyped_storage()._cdata
    assert copied.weight.fake_mode is mode
    assert copied.weight.requires_grad
    assert isinstance(copied.weight, nn.Parameter)
    assert "__deepcopy__" not in vars(type(model.weight))


def test_generators():
    with pytest.raises(RuntimeError):
        torch.Generator("cuda")
    with patches.generators_on_cpu():
        assert torch.Generator("cuda").device.type == "cpu"
        assert isinstance(torch.Generator("cuda"), torch.Generator)


def test_properties():
    with pytest.raises(RuntimeError, match="NVIDIA driver"):
        torch.cuda.get_device_properties("cuda")
    with patches.properties_without_gpu():
        assert torch.cuda.get_device_properties("cuda").L2_cache_size > 0


def test_scaled_updates(mode):
    class Counting(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            self.steps += 1

    with patches.autocast_without_gpu(), patches.foreach_optimizers():
        scaler = torch.GradScaler("cuda")
        parameter = nn.Parameter(torch.empty(4, device="cuda"))
        optimizer = Counting([parameter], lr=0.1)

        def update():
            parameter.grad = scaler.scale(torch.empty(4, device="cuda"))
            scaler.step(optimizer)

        with pytest.raises(Exception, match="_local_scalar_dense"):
            update()
        scaler = torch.GradScaler("cuda")
        with patches.scaled_updates_are_made():
            update()
    assert optimizer.steps == 1


def test_backward(mode):
    roots = []
    with patches.backward_replaced(lambda *args, **kwargs: roots.append(args[0])):
        loss = torch.empty(3, requires_grad=True).sum()
        loss.backward()
    assert roots == [loss]
    assert torch.autograd.backward.__module__ == "torch.autograd"


def test_unset_gradients():
    class Asks(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(False)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    x = torch.ones(2, requires_grad=True)
    assert patches.wants_zeros(Asks.apply(x).grad_fn)  # torch does not tell
    with patches.unset_gradients_remembered():
        assert not patches.wants_zeros(Asks.apply(x).grad_fn)


def test_graph_task():
    assert torch._C._current_graph_task_id() == -1
    with patches.graph_task():
        first = torch._C._current_graph_task_id()
    with patches.graph_task():
        assert torch._C._current_graph_task_id() != first
    assert torch._C._current_graph_task_id() == -1


def test_saved_tensor_hooks():
    pushed, popped = [], []

    def wrap(pack, unpack):
        pushed.append(pack)
        return pack, unpack

    with (
        patches.saved_tensor_hooks_replaced(wrap, lambda: popped.append(1)),
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    ):
        torch.ones(2, requires_grad=True).exp()
    assert (len(pushed), len(popped)) == (1, 1)


def test_saved_tensors_let_go():
    """A node asks that they go where they are read last; the engine keeps those of a kept graph."""
    kept, asked = [], []

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
            kept.append(not storage.expired())
            return grad

    y = Reads.apply(torch.ones(2, requires_grad=True)).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert kept == [True, False]
    y = Reads.apply(torch.ones(2, requires_grad=True))
    with patches.saved_tensors_released(lambda: asked.append(True)):
        y.grad_fn.apply(torch.ones(2))
    assert (kept[2:], asked) == ([True], [True])
