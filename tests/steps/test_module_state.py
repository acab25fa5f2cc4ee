"""Changes of what a module's code can read are noticed, or the module is unreadable."""

import dataclasses
import functools
import sys

import pytest
import torch
from timm.models import create_model
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

import tresnet
from tresnet.steps.module_state import ModuleState


@dataclasses.dataclass
class Box:
    content: object = 0.1


class Slotted:
    __slots__ = ("content",)


class Float(float):
    """A number with attributes, which may change."""


class Holder(nn.Module):
    def __init__(self, box):
        super().__init__()
        self.box = box
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def fill(box, content=0.5):
    box.content = content


def tensor_with_attribute():
    tensor = torch.ones(3)
    tensor.content = 0.1
    return tensor


def new_class(content=0.1):
    return type("Inherited", (type("Base", (), {"content": content}),), {})


def reorder(box):
    box["a"] = box.pop("a")


CHANGES = {
    "list": (lambda: [0.1], lambda box: box.__setitem__(0, 0.5)),
    "longer list": (lambda: [0.1], lambda box: box.append(0.5)),
    "between lists": (lambda: ([0.1], []), lambda box: box[1].append(box[0].pop())),
    "dict": (lambda: {"a": 0.1}, lambda box: box.update(a=0.5)),
    "key of a dict": (lambda: {"a": 0.1}, lambda box: box.update(b=box.pop("a"))),
    "order of a dict": (lambda: {"a": 0.1, "b": 0.1}, reorder),
    "set": (lambda: {0.1}, lambda box: (box.clear(), box.add(0.5))),
    "list in a tuple": (lambda: ([0.1],), lambda box: box[0].__setitem__(0, 0.5)),
    "object": (Box, fill),
    "integer for a truth": (lambda: Box(True), lambda box: fill(box, 1)),
    "equal list": (lambda: Box([0.1]), lambda box: fill(box, list(box.content))),
    "attributes": (Box, lambda box: setattr(box, "__dict__", {"content": 0.5})),
    "type": (Box, lambda box: setattr(box, "__class__", new_class())),
    "dict in an object": (lambda: Box({"a": 0.1}), lambda box: box.content.update(a=0.5)),
    "class": (new_class, fill),
    "object in a class": (lambda: new_class(Box()), lambda box: fill(box.content)),
    "list in a class": (lambda: new_class([0.1]), lambda box: box.content.append(0.5)),
    "base class": (lambda: new_class()(), lambda box: fill(type(box).__base__)),
    "method": (lambda: new_class()(), lambda box: fill(type(box), abs)),
    "attribute of a tensor": (tensor_with_attribute, fill),
    "memory of a tensor": (lambda: [torch.ones(3)], lambda box: box[0].set_(torch.ones(3))),
    "trained tensor": (lambda: [torch.ones(3)], lambda box: box[0].requires_grad_()),
    "options of a partial": (
        lambda: functools.partial(functional.gelu, approximate="none"),
        lambda box: box.keywords.update(approximate="tanh"),
    ),
}


@pytest.mark.parametrize(("make", "change"), CHANGES.values(), ids=CHANGES)
def test_a_changed_value_is_noticed(make, change):
    module = Holder(make())
    state = ModuleState(module)
    assert state.unreadable is None
    module.layers(torch.ones(2, 2))
    assert state.is_unchanged(), "running statistics and other contents of tensors may change"
    change(module.box)
    assert not state.is_unchanged()


def test_layers_in_another_order_are_noticed():
    layers = nn.Sequential(nn.Tanh(), nn.ReLU())
    state = ModuleState(layers)
    layers._modules["0"] = layers._modules.pop("0")
    assert not state.is_unchanged()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: lambda x: x, "Holder.box, <function <lambda>"),
        (lambda: torch.compile(lambda x: x), "Holder.box, <function <lambda>"),
        (lambda: functools.partial(lambda x: x), "Holder.box, <function <lambda>"),
        (lambda: nn.Identity().forward, "Holder.box, <bound method"),
        (lambda: iter([Float()]).__next__, "Holder.box, <method-wrapper"),
        (lambda: {"a": iter(())}, "Holder.box['a'], <tuple_iterator"),
        (lambda: [Slotted()], "Holder.box[0], <tests.steps.test_module_state.Slotted"),
        (lambda: Float(0.1), "Holder.box, 0.1"),
        (lambda: sys, "Holder.box, <module 'sys'"),
        (lambda: torch.ones(2).numpy(), "Holder.box, array("),
        (lambda: torch.jit.script(nn.Tanh()), "Holder._modules['box']._c, <torch"),
    ],
)
def test_values_whose_changes_would_not_be_noticed_are_named(make, named):
    assert ModuleState(Holder(make())).unreadable.startswith(named)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tresnet.create("tresnet_m", width_factor=0.125),
        lambda: tresnet.surgery.fold(tresnet.create("tresnet_t", jit=True).eval()),
        lambda: tresnet.create("tresnet_t", head="ml_decoder", norm="batchnorm"),
        lambda: tresnet.create("tresnet_t", head="group_attention"),
        lambda: tresnet.create("tresnet_t", features_only=True),
        lambda: create_model("test_resnet"),
        lambda: create_model("test_vit"),
        lambda: weight_norm(nn.Linear(2, 2)),
        lambda: nn.SyncBatchNorm(2),
    ],
)
def test_models_are_readable_with_all_their_parameters(make):
    model = make()
    state = ModuleState(model)
    assert state.unreadable is None
    assert state.is_unchanged()
    assert {*map(id, state.parameters)} == {*map(id, model.parameters())}
