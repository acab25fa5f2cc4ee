"""Merged branches: equal outputs and gradients, and the way back."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.surgery.branches import AttentionBranch, GroupHead
from tresnet.errors import InputError
from tresnet.layers.global_pool import GlobalPool2d
from tresnet.layers.grouped_conv import GroupedConv2d
from tresnet.layers.grouped_linear import GroupedLinear
from tresnet.layers.norm import ABN
from tresnet.models.blocks import BasicBlock, BlockSettings, Bottleneck
from tresnet.surgery import merge_parallel, pick_fastest, split

G, C = 3, 8
TOLERANCE = {"rtol": 0, "atol": 1e-10}


def block(kind: type, planes: int, stride: int, norm: str = "abn") -> nn.Module:
    return kind(C, planes, stride, True, 0.0, BlockSettings(norm))


class Shapes(nn.Module):
    """Sizes, indexing, products and functions, as people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate = nn.Conv2d(C, 4, 1), nn.Conv2d(C, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x).mean(dim=(2, 3)))[:, :, None, None]
        y = torch.relu(self.conv(x)) * gate - 0.5
        return torch.flatten(y, 1)


BRANCHES: dict[str, Callable[[int], nn.Module]] = {
    "attention": lambda i: AttentionBranch(C, 4),
    "head": lambda i: GroupHead(C, (2, 5, 3)[i]),
    "basic": lambda i: block(BasicBlock, C, 1),
    "basic, strided": lambda i: block(BasicBlock, 16, 2),
    "bottleneck": lambda i: block(Bottleneck, 4, 2),
    "bottleneck, batchnorm": lambda i: block(Bottleneck, 2, 1, "batchnorm"),
    "lone convolution": lambda i: nn.Conv2d(C, 5, 3),
    "grouped convolution": lambda i: nn.Conv2d(C, 6, 3, groups=2),
    "pools before": lambda i: nn.Sequential(
        nn.MaxPool2d(2),
        ABN(C),
        nn.Conv2d(C, 4, 1),
        nn.LeakyReLU(0.1),
        GlobalPool2d(),
        nn.Linear(4, 6),
    ),
    "linear layers": lambda i: nn.Sequential(
        GlobalPool2d("max"), nn.Linear(C, 6), nn.Tanh(), nn.Linear(6, 2 + i), nn.Sigmoid()
    ),
    "functions": lambda i: Shapes(),
    "no parameters": lambda i: nn.Sequential(nn.AvgPool2d(2), nn.ReLU()),
}


def make(name: str) -> nn.ModuleList:
    """Branches with statistics and gammas of their own, in float64."""
    branches = nn.ModuleList(BRANCHES[name](i) for i in range(G)).double()
    for module in branches.modules():
        if hasattr(module, "running_var"):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return branches


def run_each(branches: nn.ModuleList, x: Tensor, shared: bool) -> Tensor:
    inputs = [x] * G if shared else x.chunk(G, 1)
    return torch.cat([b(part) for b, part in zip(branches, inputs, strict=True)], 1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", BRANCHES)
def test_outputs_gradients_and_statistics_are_the_branches_own(
    name: str, shared: bool, training: bool
):
    branches = make(name).train(training)
    merged = merge_parallel(branches, shared_input=shared)
    x = torch.randn(2, C if shared else G * C, 10, 9, dtype=torch.float64, requires_grad=True)
    expected, found = run_each(branches, x, shared), merged(x)
    probe = torch.randn_like(expected)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    grad_x = [torch.autograd.grad(y, x, probe, retain_graph=True)[0] for y in (expected, found)]
    torch.testing.assert_close(*grad_x, **TOLERANCE)
    if any(True for _ in branches.parameters()):
        for y in (expected, found):
            y.backward(probe)
    with torch.no_grad():  # the gradients take the weights' way back
        for parameter in merged.parameters():
            parameter.copy_(parameter.grad)
    back = split(merged)
    for own, other in zip(branches.parameters(), back.parameters(), strict=True):
        torch.testing.assert_close(other.detach(), own.grad, **TOLERANCE)
    for own, other in zip(branches.buffers(), back.buffers(), strict=True):
        torch.testing.assert_close(other, own, **TOLERANCE)


@pytest.mark.parametrize("name", ["head", "basic", "lone convolution"])
def test_split_gives_the_branches_back_bit_for_bit(name: str):
    branches = make(name).eval()
    branches[0].train()
    branches[0].eval()
    back = split(merge_parallel(branches))
    assert not back[0].training
    assert type(back[0]) is type(branches[0])
    mine, other = branches.state_dict(), back.state_dict()
    assert list(mine) == list(other)
    assert all(torch.equal(mine[key], other[key]) for key in mine)
    x = torch.randn(2, C, 6, 6, dtype=torch.float64)
    for a, b in zip(branches, back, strict=True):
        assert torch.equal(a(x), b(x))


def test_the_document_head_is_grouped_where_it_can_be():
    merged = merge_parallel(make("head")).merged
    assert merged.attention.conv1.groups == 1, "a shared input needs one dense convolution"
    assert merged.attention.conv2.groups == G
    assert merged.attention.conv3.groups == G
    assert isinstance(merged.fc, GroupedLinear)
    assert merged.fc.out_features == (2, 5, 3)
    assert "repeat" not in merged.code
    assert "spread" not in merged.code


def test_the_merged_module_is_its_own_and_can_be_copied():
    branches = make("attention")
    merged = merge_parallel(branches)
    before = branches[0].conv1.weight.clone()
    with torch.no_grad():
        merged.merged.conv1.weight.zero_()
    assert torch.equal(branches[0].conv1.weight, before)
    twin = copy.deepcopy(merged)
    twin.load_state_dict(merged.state_dict())
    assert split(twin)[1].conv1.weight.abs().max() == 0


def test_frozen_weights_stay_frozen():
    branches = make("attention")
    for branch in branches:
        branch.conv2.requires_grad_(False)
    merged = merge_parallel(branches)
    assert not merged.merged.conv2.weight.requires_grad
    assert merged.merged.conv1.weight.requires_grad
    assert not split(merged)[0].conv2.weight.requires_grad


def test_dropout_is_drawn_for_each_branch():
    merged = merge_parallel([nn.Sequential(nn.Dropout(0.5), nn.Identity()) for _ in range(2)])
    y = merged(torch.ones(1, 64, 4, 4))
    assert y.shape[1] == 128
    assert not torch.equal(*y.chunk(2, 1))


@pytest.mark.parametrize("impl", ["matmul", "loop"])
def test_every_way_to_run_computes_the_same(impl: str):
    conv = GroupedConv2d(6, 9, 1, groups=3, dtype=torch.float64)
    x = torch.randn(2, 6, 5, 4, dtype=torch.float64, requires_grad=True)
    results = []
    for way in ("conv", impl):
        conv.use(way)
        y = conv(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *conv.parameters()])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)


def test_a_way_that_does_not_fit_is_refused():
    with pytest.raises(InputError, match="out of conv, loop, got 'matmul'"):
        GroupedConv2d(6, 9, 3, groups=3).use("matmul")
    with pytest.raises(InputError, match="out of conv, got 'loop'"):
        GroupedConv2d(6, 9, 3).use("loop")


def test_pick_fastest_takes_the_way_with_the_least_time(monkeypatch: pytest.MonkeyPatch):
    merged = merge_parallel(make("attention"))
    x = torch.randn(2, C, 6, 6, dtype=torch.float64)
    before = copy.deepcopy(merged.state_dict())
    times_s = {"conv": 3.0, "loop": 2.0, "matmul": 1.0}
    monkeypatch.setattr("tresnet.surgery.parallel._time", lambda c, impl, e: times_s[impl])
    chosen = pick_fastest(merged, x)
    assert chosen == {
        "merged.conv1": "conv",
        "merged.conv2": "loop",
        "merged.conv3": "matmul",
    }
    assert merged.training
    assert all(torch.equal(before[k], v) for k, v in merged.state_dict().items())
    monkeypatch.undo()
    assert set(pick_fastest(merged, x, repeats=1)) == set(chosen)


class Parameterised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Softmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, 1)


class Swapped(AttentionBranch):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(
            self.bn3(
                self.conv3(self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))))
            )
        )


@pytest.mark.parametrize(
    ("branches", "message"),
    [
        (lambda: [], "at least one branch"),
        (lambda: [AttentionBranch(8, 4), AttentionBranch(8, 2)], "conv1 differs.*in branch 1"),
        (lambda: [AttentionBranch(8, 4), GroupHead(8, 4)], "branch 1 has other layers"),
        (lambda: [AttentionBranch(8, 4), Swapped(8, 4)], "branch 1 connects its layers otherwise"),
        (lambda: [nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1).eval()], "0 is in training mode"),
        (lambda: [nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1).double()], "0.weight differs in dtype"),
        (lambda: [nn.GroupNorm(2, 4)] * 2, "0 is GroupNorm, which has no rule"),
        (lambda: [Parameterised(), Parameterised()], "Parameterised.*holds scale itself"),
        (lambda: [Branching(), Branching()], "branch 0 .Branching. cannot be traced"),
        (lambda: [Softmax(), Softmax()], r"call softmax\(1,\) in softmax"),
        (
            lambda: [nn.Sequential(nn.Linear(3, n), nn.Linear(n, 2)) for n in (4, 5)],
            "1 differs: Linear.in_features=4",
        ),
        (
            lambda: [
                nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
                nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)),
            ],
            "1 differs: BatchNorm1d",
        ),
    ],
)
def test_bad_branches_are_refused(branches: Callable[[], list[nn.Module]], message: str):
    with pytest.raises(InputError, match=message):
        merge_parallel(branches())


def test_split_needs_a_merged_module():
    with pytest.raises(InputError, match="merge_parallel returned, got Linear"):
        split(nn.Linear(2, 2))


@pytest.mark.slow
def test_the_documents_own_sizes():
    counts = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 14]
    branches = nn.ModuleList(GroupHead(512, n) for n in counts).eval()
    reduce = nn.Sequential(nn.Conv2d(2048, 512, 1, bias=False), nn.BatchNorm2d(512), nn.ReLU())
    merged = merge_parallel(branches)
    with torch.no_grad():
        x = reduce.eval()(torch.randn(1, 2048, 14, 14))
        expected = torch.cat([branch(x) for branch in branches], 1)
        found = merged(x)
    assert found.shape == (1, 80)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert [branch.fc.out_features for branch in split(merged)] == counts
