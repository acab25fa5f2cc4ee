"""Steps between the layers of merged branches, and blocks of timm and torchvision."""

import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.surgery.branches import GroupHead
from tresnet.errors import InputError
from tresnet.models.blocks import BasicBlock, BlockSettings
from tresnet.surgery import merge_parallel
from tresnet.surgery.merge_rules import BranchDropPath

G, C = 3, 8
TOLERANCE = {"rtol": 0, "atol": 1e-10}
Step = Callable[[Tensor, Tensor, Tensor], Tensor]


class Steps(nn.Module):
    """Convolutions to 4 channels and to 1, and what follows them."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.conv, self.one, self.step = nn.Conv2d(C, 4, 1), nn.Conv2d(C, 1, 3, padding=1), step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self.conv(x), torch.sigmoid(self.one(x)), x)


def unpacked(y: Tensor, gate: Tensor, x: Tensor) -> Tensor:
    n, c, h, w = (y * gate).shape
    return F.avg_pool2d(y, (h, w)).view(n, c)


STEPS: dict[str, Step] = {
    "gate of one channel": lambda y, gate, x: y * gate,
    "gate in front": lambda y, gate, x: gate - y,
    "gate of the input": lambda y, gate, x: gate * x,
    "quotient": lambda y, gate, x: y / (gate + 2) / 3,
    "flatten by keyword": lambda y, gate, x: torch.flatten(y, start_dim=1),
    "unpacked sizes": unpacked,
    "pool over sizes": lambda y, gate, x: F.max_pool2d(y, y.size()[2:]).view(y.size(0), -1),
    "pool over the last sizes": lambda y, gate, x: F.avg_pool2d(y, (y.shape[-2], y.size(-1))),
    "number of rows": lambda y, gate, x: y * y.size(2),
}


def assert_same(branches: list[nn.Module], training: bool) -> None:
    branches = [branch.double().train(training) for branch in branches]
    merged = merge_parallel(branches)
    x = torch.randn(2, C, 5, 6, dtype=torch.float64, requires_grad=True)
    expected, found = torch.cat([branch(x) for branch in branches], 1), merged(x)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    probe = torch.randn_like(expected)
    grads = [torch.autograd.grad(y, x, probe)[0] for y in (found, expected)]
    torch.testing.assert_close(*grads, **TOLERANCE)


@pytest.mark.parametrize("name", STEPS)
def test_steps_that_keep_branches_apart(name: str):
    assert_same([Steps(STEPS[name]) for _ in range(G)], training=True)


@pytest.mark.parametrize(
    ("step", "call"),
    [
        (lambda y, gate, x: y * y.size(1), "mul"),
        (lambda y, gate, x: y / y.shape[1], "truediv"),
        (lambda y, gate, x: y.mean((2, 3)) * y.size(-1), "mul"),
        (lambda y, gate, x: gate.mean((2, 3)).view(-1, x.size(1)), "view"),
        (lambda y, gate, x: y * (y.size(1) * 2 + y.size(2)), "mul"),
    ],
)
def test_numbers_of_channels_are_refused(step: Step, call: str):
    with pytest.raises(InputError, match=f"a number of channels in {call}"):
        merge_parallel([Steps(step) for _ in range(G)])


def timm_block(kind: str) -> nn.Module:
    import timm.layers
    import timm.models.resnet as resnet

    blocks = {
        "basic": lambda: resnet.BasicBlock(C, C),
        "bottleneck": lambda: resnet.Bottleneck(C, 2, attn_layer="se"),
        "norm and activation": lambda: timm.layers.ConvNormAct(C, 4, 3),
    }
    return blocks[kind]()


def torchvision_block(kind: str) -> nn.Module:
    from torchvision.models import mobilenetv2, resnet

    blocks = {
        "bottleneck": lambda: resnet.Bottleneck(C, 2),
        "inverted": lambda: mobilenetv2.InvertedResidual(C, C, 1, 2),
    }
    return blocks[kind]()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (timm_block, "basic"),
        (timm_block, "bottleneck"),
        (timm_block, "norm and activation"),
        (torchvision_block, "bottleneck"),
        (torchvision_block, "inverted"),
    ],
)
def test_blocks_of_others(make: Callable[[str], nn.Module], kind: str, training: bool):
    assert_same([make(kind) for _ in range(G)], training)


def test_drop_path_is_drawn_for_each_branch_and_off_in_evaluation():
    blocks = [BasicBlock(C, C, 1, False, 0.5, BlockSettings("batchnorm")) for _ in range(G)]
    for block in blocks:
        nn.init.ones_(block.conv2.bn.weight)
    assert_same(blocks, training=False)
    merged = merge_parallel(blocks)
    drop = merged.merged.drop_path
    assert isinstance(drop, BranchDropPath)
    kept = drop.train()(torch.ones(400, G * C, 1, 1)).unflatten(1, (G, C))[..., 0, 0]
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(kept, kept[:, :, :1].expand_as(kept)), "a branch is dropped whole"
    each = kept[:, :, 0] > 0
    # 400 fair coins: five standard deviations are 50
    assert ((each.sum(0) - 200).abs() < 50).all()
    assert (abs((each[:, 0] == each[:, 1]).sum() - 200)) < 50, "branches draw on their own"


def test_linear_layers_want_features_in_dimension_1():
    merged = merge_parallel([nn.Linear(5, 2) for _ in range(G)])
    with pytest.raises(InputError, match=r"expected \(N, 5\).* got \(2, 4, 5\)"):
        merged(torch.zeros(2, 4, 5))


@pytest.mark.parametrize("first", [nn.Identity, lambda: nn.BatchNorm2d(C)])
def test_a_merged_module_can_be_pickled_and_scripted(first: Callable[[], nn.Module]):
    branches = [nn.Sequential(first(), GroupHead(C, classes)) for classes in (2, 3, 1)]
    merged, x = merge_parallel(branches).eval(), torch.randn(2, C, 4, 4)
    assert torch.equal(pickle.loads(pickle.dumps(merged))(x), merged(x))
    torch.testing.assert_close(torch.jit.script(merged)(x), merged(x))


def test_16_bits_stay_16_bits():
    heads = [GroupHead(C, classes) for classes in (2, 3, 1)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert merge_parallel(heads)(torch.randn(2, C, 4, 4)).dtype == torch.bfloat16
