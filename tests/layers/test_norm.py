"""Our norms are batch norms to every tool; one that replaces them keeps their activation."""

import copy
from collections.abc import Callable

import pytest
import timm.layers
import timm.utils
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import update_bn

from tests import toys
from tresnet.layers.norm import NORMS, FrozenRunningStats, InplaceABN, NormAct

CLASSES = pytest.mark.parametrize("name", toys.NORMS)


def small(norm: str = "abn", **options) -> nn.Module:
    """A model with a block of each kind, a grouped head, and statistics of its own."""
    head = {"head": "group_attention", "head_groups": 2, "head_channels": 4, "num_classes": 4}
    return toys.network(norm=norm, layers=(1, 1, 1, 1), **head, **options)


@toys.NEEDS_PACKAGE
def test_a_weight_of_in_place_abn_below_eps_is_reflected():
    norm, x = InplaceABN(2).eval(), torch.randn(2, 2, 3, 3)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([-0.3, 0.5]))
    gamma = torch.tensor([0.3 + 2 * norm.eps, 0.5])
    y = F.batch_norm(x, norm.running_mean, norm.running_var, gamma, norm.bias, eps=norm.eps)
    expected = F.leaky_relu(y, norm.slope)
    torch.testing.assert_close(torch.jit.trace(norm, x)(x), expected)
    torch.testing.assert_close(norm(x.clone()), expected)
    torch.testing.assert_close(norm.state_dict()["weight"], gamma)
    torch.testing.assert_close(norm(x), expected)


@CLASSES
@pytest.mark.parametrize("momentum", [0.3, None])
def test_statistics_are_collected_as_by_torch(name: str, momentum: float | None):
    norm, plain = NORMS[name](3, momentum=momentum), nn.BatchNorm2d(3, momentum=momentum)
    batches = [torch.randn(4, 3, 5, 5) * (i + 1) + i for i in range(3)]
    for x in batches:
        norm(x.clone())
        plain(x)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(norm.state_dict()[key], value, msg=key)
    norm(batches[0].clone())
    update_bn([x.clone() for x in batches], norm)  # from the beginning, as a mean of all
    torch.testing.assert_close(
        norm.running_mean, torch.stack([x.mean((0, 2, 3)) for x in batches]).mean(0)
    )
    assert norm.momentum == momentum


def test_a_scripted_norm_counts_and_averages_too():
    norm = NormAct(3, momentum=None)
    scripted = torch.jit.script(copy.deepcopy(norm))
    for i in range(2):
        x = torch.randn(4, 3, 5, 5) + i
        torch.testing.assert_close(scripted(x), norm(x))
    torch.testing.assert_close(scripted.state_dict(), norm.state_dict())


@CLASSES
def test_statistics_that_are_not_tracked_or_frozen_stay(name: str):
    norm, x = NORMS[name](3), torch.randn(4, 3, 5, 5)
    expected = norm(x.clone())
    before = copy.deepcopy(norm.state_dict())
    norm.track_running_stats = False  # Lightning's way to freeze
    torch.testing.assert_close(norm(x.clone()), expected)
    norm.track_running_stats = True
    frozen = FrozenRunningStats()
    with frozen:
        with frozen:
            pass
        torch.testing.assert_close(norm(x.clone()), expected)
    torch.testing.assert_close(norm.state_dict(), before)
    norm(x)
    assert norm.num_batches_tracked == before["num_batches_tracked"] + 1


def test_without_statistics_the_batch_normalises():
    model, x = small(), torch.rand(2, 3, 32, 32)
    expected = copy.deepcopy(model).train()(x)
    stateless = torch.func.replace_all_batch_norm_modules_(model)
    torch.testing.assert_close(stateless.eval()(x), expected)
    torch.testing.assert_close(stateless.train()(x), expected)


def folded_in(model: nn.Module) -> nn.Module:
    stem = model.body.conv1
    stem.conv, stem.bn = nn.utils.fuse_conv_bn_eval(stem.conv, stem.bn), nn.Identity()
    return model


def frozen_part(model: nn.Module) -> nn.Module:
    timm.utils.freeze(model, ["body.layer1", "body.conv1"])
    assert not any(p.requires_grad for p in model.body.layer1.parameters())
    assert not any(isinstance(m, NormAct) for m in model.body.layer1.modules())
    return model


TOOLS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "synchronised": nn.SyncBatchNorm.convert_sync_batchnorm,
    "frozen": timm.layers.freeze_batch_norm_2d,
    "unfrozen": lambda m: timm.layers.unfreeze_batch_norm_2d(timm.layers.freeze_batch_norm_2d(m)),
    "a part frozen": frozen_part,
    "folded in": folded_in,
}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_that_replaces_norms_keeps_the_function(tool: str):
    model, x = small(), torch.rand(2, 3, 32, 32)
    expected = model(x)
    norms = sum(isinstance(m, NormAct) for m in model.modules())
    other = TOOLS[tool](copy.deepcopy(model)).eval()
    assert sum(isinstance(m, NormAct) for m in other.modules()) < norms
    torch.testing.assert_close(other(x), expected)
    for which in (model, other):
        which.set_slopes(0.3, 0.2)
    torch.testing.assert_close(other(x), model(x))
    if tool in ("synchronised", "unfrozen"):
        torch.testing.assert_close(other.train()(x), model.train()(x))
        for name, buffer in other.named_buffers():
            if "running" in name:  # timm does not keep the number of batches
                torch.testing.assert_close(buffer, model.get_buffer(name))
