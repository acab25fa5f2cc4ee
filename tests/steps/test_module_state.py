"""Changes of what a replay holds as constants are noticed."""

import pytest
import torch
from torch import nn

import tresnet
from tresnet.steps.module_state import ModuleState

CHANGES = {
    "parameter": lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.clone())),
    "memory of a parameter": lambda m: setattr(m[0].weight, "data", m[0].weight.clone()),
    "buffer": lambda m: setattr(m[1], "running_mean", m[1].running_mean + 1),
    "new buffer": lambda m: m[0].register_buffer("extra", torch.ones(1)),
    "frozen parameter": lambda m: m[0].weight.requires_grad_(False),
    "mode of a part": lambda m: m[1].eval(),
    "declared constant": lambda m: setattr(m[2], "p", 0.5),
    "replaced part": lambda m: m.__setitem__(2, nn.Dropout(0.1)),
    "longer": lambda m: m.append(nn.ReLU()),
    "order": lambda m: m._modules.update({"0": m[2], "2": m[0]}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed(change):
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.1))
    state = ModuleState(module)
    module(torch.ones(2, 2))
    assert state.is_unchanged(), "running statistics and other contents of tensors may change"
    change(module)
    assert not state.is_unchanged()


@pytest.mark.parametrize(
    "make",
    [
        lambda: tresnet.create("tresnet_m", width_factor=0.125, head="ml_decoder"),
        lambda: torch.jit.script(nn.Linear(2, 2)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        lambda: nn.functional.cross_entropy,
    ],
)
def test_any_model_or_criterion_can_be_read(make):
    root = make()
    state = ModuleState(root)
    assert not state.is_hooked()
    parameters = root.parameters() if isinstance(root, nn.Module) else ()
    assert {*map(id, state.parameters)} == {*map(id, parameters)}
