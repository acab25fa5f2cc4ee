"""Merged branches: equal outputs, gradients and statistics, and the way back."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from timm.models.resnet import Bottleneck
from torch import nn

from tests.live_storages import live_after
from tresnet.layers.norm import ABN
from tresnet.models import blocks
from tresnet.surgery import merge_parallel

G, C = 3, 8
TOLERANCE = {"rtol": 0, "atol": 1e-10}


def block(kind: type, planes: int, stride: int, norm: str = "abn") -> nn.Module:
    return kind(C, planes, stride, blocks.BlockSettings(norm, 1e-3, False))


def bottleneck(planes: int = 2) -> nn.Module:
    return Bottleneck(C, planes, attn_layer="se")


BRANCHES: dict[str, Callable[[], nn.Module]] = {
    "timm's": bottleneck,
    "head": lambda: nn.Sequential(
        bottleneck(), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(C, 5)
    ),
    "basic": lambda: block(blocks.BasicBlock, 16, 2),
    "bottleneck": lambda: block(blocks.Bottleneck, 4, 2),
    "bottleneck, batchnorm": lambda: block(blocks.Bottleneck, 2, 1, "batchnorm"),
    "grouped convolution": lambda: nn.Conv2d(C, 6, 3, groups=2),
    "norm first": lambda: nn.Sequential(nn.MaxPool2d(2), ABN(C), nn.Conv2d(C, 4, 1), nn.GELU()),
}


def make(name: str) -> nn.ModuleList:
    """Branches with statistics and gammas of their own, in float64."""
    branches = nn.ModuleList(BRANCHES[name]() for _ in range(G)).double()
    for module in branches.modules():
        if hasattr(module, "running_var"):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return branches


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("name", "shared"), [(name, i % 2 == 0) for i, name in enumerate([*BRANCHES, "timm's"], 1)]
)
def test_outputs_gradients_and_statistics_are_the_branches_own(name, shared, training):
    branches = make(name).train(training)
    merged = merge_parallel(branches, shared_input=shared)
    x = torch.randn(2, C if shared else G * C, 10, 9, dtype=torch.float64, requires_grad=True)
    inputs = [x] * G if shared else x.chunk(G, 1)
    expected = torch.cat([b(part) for b, part in zip(branches, inputs, strict=True)], 1)
    found = merged(x)
    probe = torch.randn_like(expected)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    grad_x = [torch.autograd.grad(y, x, probe, retain_graph=True)[0] for y in (expected, found)]
    torch.testing.assert_close(*grad_x, **TOLERANCE)
    for y in (expected, found):
        y.backward(probe)
    for name, stacked in merged.merged.named_parameters():  # the gradients, one for each branch
        own = torch.stack([branch.get_parameter(name).grad for branch in branches])
        torch.testing.assert_close(stacked.grad, own, **TOLERANCE)
    for name, stacked in merged.merged.named_buffers():
        own = torch.stack([branch.get_buffer(name) for branch in branches])
        torch.testing.assert_close(stacked, own, **TOLERANCE)


def test_the_merged_module_is_its_own_and_keeps_what_is_frozen():
    branches = make("timm's")
    for branch in branches:
        branch.conv1.requires_grad_(False)
    merged = merge_parallel(branches)
    with torch.no_grad():
        merged.merged.conv2.weight.zero_()
    assert branches[0].conv2.weight.any()
    frozen = {name for name, p in merged.named_parameters() if not p.requires_grad}
    assert frozen == {"merged.conv1.weight"}
    assert not merged.eval().merged.training
    for again in (copy.deepcopy(merged), pickle.loads(pickle.dumps(merged))):
        x = torch.randn(2, C, 4, 4, dtype=torch.float64)
        assert torch.equal(again(x), merged(x))


def test_each_branch_drops_on_its_own():
    merged = merge_parallel([nn.Sequential(nn.Dropout(0.5), nn.PReLU()) for _ in range(G)])
    y = merged(torch.ones(1, 1000))
    kept = y.unflatten(1, (G, 1000)) > 0
    assert not torch.equal(kept[:, 0], kept[:, 1])
    assert 400 < kept[0, 0].sum() < 600, "five standard deviations of 1000 fair coins are 79"


def reordered(module: nn.Module) -> nn.Module:
    """Register the module's weight after its bias, as pruning does; return the module."""
    module.register_parameter("weight", module._parameters.pop("weight"))
    return module


def test_tensors_are_found_by_name_in_any_order():
    branches = [nn.Linear(8, 4), reordered(nn.Linear(8, 4))]
    x = torch.randn(2, 8)
    expected = torch.cat([branch(x) for branch in branches], 1)
    torch.testing.assert_close(merge_parallel(branches)(x), expected)


def test_a_shared_input_is_not_copied_for_each_branch():
    """Merge twelve groups, as the document does by torch.cat, on narrower maps."""
    branches = nn.ModuleList(bottleneck() for _ in range(12))
    merged, x = merge_parallel(branches), torch.randn(2, C, 5, 5, requires_grad=True)
    sizes = [
        sum(size for _, size in live_after(run, [x, *module.parameters(), *module.buffers()]))
        for run, module in (
            (lambda: merged(x), merged),
            (lambda: torch.cat([branch(x) for branch in branches], 1), branches),
        )
    ]
    assert sizes[0] <= sizes[1]
