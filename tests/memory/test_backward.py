"""Backward in Python against autograd: equal gradients, and equal memory on fake tensors."""

import warnings
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.toys import sgd
from tresnet.memory.backward import PythonEngine, SavedTensors
from tresnet.memory.device import GENERIC
from tresnet.memory.patches import backward_replaced
from tresnet.memory.plan import make_plan, plan_of
from tresnet.memory.prediction import record
from tresnet.memory.replay import replay
from tresnet.peers import build_named


class TwoOutputs(torch.autograd.Function):
    """Arguments that are no tensors before and between; one output unused."""

    @staticmethod
    def forward(ctx, factor, x, name, w):
        ctx.factor = factor
        ctx.save_for_backward(x, w)
        return x * w * factor, x + w

    @staticmethod
    def backward(ctx, first, second):
        x, w = ctx.saved_tensors
        return None, first * w * ctx.factor + second, None, first * x * ctx.factor + second


class NoZeros(torch.autograd.Function):
    """Asks for None where no gradient came."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        assert second is None
        return first * 2


class Unread(torch.autograd.Function):
    """Its backward does not read what its forward saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def diamond(x, w):
    a = x @ w
    return (a.relu() + a.sigmoid() * a).sum() + a.mean()


def custom(x, w):
    return TwoOutputs.apply(3.0, x @ w, "name", w.sum() * x @ w)[0].pow(2).sum()


def no_zeros(x, w):
    return NoZeros.apply(x @ w)[0].sum()


def checkpointed(x, w, use_reentrant=False):
    y = checkpoint(lambda t: (t @ w).relu().exp(), x * 1.0, use_reentrant=use_reentrant)
    return (y * y).sum()


def reentrant(x, w):
    return checkpointed(x, w, use_reentrant=True)


def conv_net(x, w):
    y = F.conv2d(x.reshape(1, 4, 2, 2), w.reshape(4, 4, 1, 1))
    return F.max_pool2d(F.batch_norm(y, None, None, training=True), 2).sum()


def leaves():
    torch.manual_seed(0)
    return torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)


@pytest.mark.parametrize(
    "graph",
    [diamond, custom, no_zeros, checkpointed, reentrant, conv_net],
    ids=lambda g: g.__name__,
)
def test_gradients_equal_autograd(graph):
    expected, got, saved = leaves(), leaves(), SavedTensors()
    for _ in range(2):
        graph(*expected).backward()
    with saved.recording(), backward_replaced(PythonEngine(saved).backward):
        for _ in range(2):
            graph(*got).backward()
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize(
    ("graph", "sum_in_place", "operator"),
    [
        (lambda y: y.exp() + y.sin(), True, "aten::add_"),
        (lambda y: y.exp() + y.sin(), False, "aten::add"),
        (lambda y: y + y, True, "aten::add"),  # both terms are one tensor
        (lambda y: y.view(3, 1) + y.view(3, 1), True, "aten::add"),  # and views of one storage
    ],
)
def test_gradients_are_added_in_place_where_they_have_no_other_owner(graph, sum_in_place, operator):
    saved, x = SavedTensors(), torch.ones(3, requires_grad=True)
    with saved.recording():
        loss = graph(x * 1.0).sum()
        with torch.autograd.profiler.profile() as profiled:
            PythonEngine(saved, sum_in_place=sum_in_place).backward(loss)
    operators = [event.name for event in profiled.function_events]
    assert [name for name in operators if name.startswith("aten::add")] == [operator]


def test_gradient_with_another_layout_is_copied_into_the_leafs():
    weight = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last).requires_grad_()
    saved = SavedTensors()
    with saved.recording():
        PythonEngine(saved).backward((weight.contiguous() * 2).sum())
    assert weight.grad.stride() == weight.stride()


@pytest.mark.parametrize("graph", [torch.square, Unread.apply])
def test_saved_tensors_are_released_while_the_loss_lives(graph):
    saved = SavedTensors()
    x = torch.ones(1000, requires_grad=True)
    with saved.recording():
        y = x.exp()
        alive = weakref.ref(y.untyped_storage())
        loss = graph(y).sum()
        del y
        assert alive() is not None
        PythonEngine(saved).backward(loss)
        assert alive() is None
    assert loss.grad_fn is not None


def test_reading_what_was_released_is_an_error():
    saved = SavedTensors()
    x = torch.ones(3, requires_grad=True)
    engine = PythonEngine(saved)
    with saved.recording():
        loss = x.exp().sum()
        engine.backward(loss)
        with pytest.raises(RuntimeError, match="after backward had released it"):
            engine.backward(loss)


def test_boxes_are_no_hooks_of_a_user_to_checkpointing():
    users_hooks = getattr(torch.utils.checkpoint, "_current_user_saved_tensors_hooks", lambda: None)
    with SavedTensors().recording():
        assert users_hooks() is None


def test_hooks_of_the_model_are_run_and_owned_as_autograd_owns_them():
    class Pack:
        def __call__(self, tensor):
            return tensor.detach() * 2

    saved = SavedTensors()
    x = torch.full((3,), 2.0, requires_grad=True)
    pack = Pack()
    alive = weakref.ref(pack)
    with saved.recording():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t / 2):
            loss = (x * x).sum()
        del pack
        assert alive() is not None
        PythonEngine(saved).backward(loss)
        assert alive() is None
    assert x.grad.tolist() == [4, 4, 4]


FEW = ["tresnet_t", "timm:test_vit"]
MANY = [
    "timm:vit_tiny_patch16_224",
    "torchvision:mobilenet_v3_small",
    "torchvision:inception_v3",
    "timm:convnext_tiny",
    "timm:swin_tiny_patch4_window7_224",
    "timm:densenet121",
    "timm:hrnet_w18_small",
    "timm:maxvit_tiny_tf_224",
    "timm:xcit_nano_12_p16_224",
    "tresnet_m",
]


def peak_and_end(name: str, *, real_engine: bool, **step: object) -> tuple[int, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = {"opt": sgd, **step}
        model: Any = name
        if "inception" in name:
            model = partial(build_named, name, aux_logits=True, init_weights=False)
            settings["input_size"] = 299
        _, module, plan = make_plan(
            model, plan_of("predict", settings.pop("batch_size", 8), settings)
        )
        trace = record(module, plan, GENERIC, device_type="cpu", real_engine=real_engine)
    replayed = replay(trace)
    return replayed.peak_allocated_bytes, replayed.allocated_bytes[-1]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        *((name, {}) for name in FEW),
        *(pytest.param(name, {}, marks=pytest.mark.slow) for name in MANY),
        ("timm:test_resnet", {"opt": torch.optim.AdamW, "accumulate": 2}),
        ("timm:test_resnet", {"grad_checkpointing": True}),
        ("timm:test_resnet", {"channels_last": True, "amp": "bf16", "ema_decay": 0.9}),
    ],
)
def test_python_equals_autograds_engine(name, step):
    expected, got = (peak_and_end(name, real_engine=real, **step) for real in (True, False))
    assert got == pytest.approx(expected, rel=1e-3)
