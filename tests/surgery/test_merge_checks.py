"""What merging refuses because a merged module would do something else than its branches."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.surgery.branches import AttentionBranch
from tresnet.errors import InputError
from tresnet.surgery import merge_parallel

SHARED = nn.Conv2d(8, 4, 1)


class Doubling(nn.Module):
    """Other steps in training."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x


class Tied(nn.Module):
    """One weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


def hooked(register: str) -> nn.Module:
    branch = nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU())
    getattr(branch[0], register)(lambda *_: None)
    return branch


def timm_layer(name: str) -> nn.Module:
    import timm.layers

    return getattr(timm.layers, name)(8, 4, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: timm_layer("StdConv2d"), "0 is StdConv2d, which has no rule"),
        (lambda: timm_layer("Conv2dSame"), "0 is Conv2dSame, which has no rule"),
        (
            lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 4, 1)),
            "0 is ParametrizedConv2d, which has no rule",
        ),
        (lambda: nn.MaxPool2d(2, return_indices=True), "0 returns indices too"),
        (lambda: hooked("register_forward_hook"), r"0 \(Conv2d\) has hooks"),
        (lambda: hooked("register_forward_pre_hook"), r"0 \(Conv2d\) has hooks"),
        (lambda: hooked("register_full_backward_hook"), r"0 \(Conv2d\) has hooks"),
        (Doubling, "Doubling.*other steps in training than in evaluation, from mul and output"),
        (Tied, "a.weight of branch 0 and b.weight of branch 0 are one tensor"),
        (lambda: SHARED, "0.weight of branch 0 and 0.weight of branch 1 are one tensor"),
    ],
)
def test_what_would_change_is_refused(make: Callable[[], nn.Module], message: str):
    with pytest.raises(InputError, match=message):
        merge_parallel([make(), make()])


def test_a_hook_of_a_parameter_is_refused():
    branches = [AttentionBranch(8, 4) for _ in range(2)]
    branches[1].conv2.weight.register_hook(lambda grad: grad * 0)
    with pytest.raises(InputError, match=r"conv2 .*weight._backward_hooks"):
        merge_parallel(branches)


def test_settings_that_a_pool_does_not_print_are_compared():
    pools = [nn.AvgPool2d(2, ceil_mode=mode) for mode in (False, True)]
    with pytest.raises(InputError, match=r"0 differs: .*ceil_mode=False.*ceil_mode=True"):
        merge_parallel(pools)


def test_looking_for_other_steps_leaves_the_modes_alone():
    branches = [AttentionBranch(8, 4) for _ in range(2)]
    for branch in branches:
        branch.bn2.eval()
    before = [[module.training for module in branch.modules()] for branch in branches]
    merged = merge_parallel(branches)
    assert before == [[module.training for module in branch.modules()] for branch in branches]
    assert (merged.merged.bn1.training, merged.merged.bn2.training) == (True, False)


@pytest.mark.parametrize(
    ("branches", "message"),
    [
        (AttentionBranch(8, 4), "a list of branches to merge, got AttentionBranch"),
        ([AttentionBranch(8, 4), 3], "expected modules to merge, but branch 1 is 3"),
    ],
)
def test_what_is_no_list_of_modules_is_refused(branches: object, message: str):
    with pytest.raises(InputError, match=message):
        merge_parallel(branches)


def test_a_layer_under_two_names_is_merged_once():
    branches = []
    for _ in range(2):
        conv = nn.Conv2d(8, 8, 1, dtype=torch.float64)
        branches.append(nn.Sequential(nn.Sequential(conv), nn.ReLU(), nn.Sequential(conv)))
    merged = merge_parallel(branches, shared_input=False)
    assert len(list(merged.parameters())) == 2
    x = torch.randn(2, 16, 3, 4, dtype=torch.float64)
    expected = torch.cat([b(part) for b, part in zip(branches, x.chunk(2, 1), strict=True)], 1)
    torch.testing.assert_close(merged(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_branches_without_values_merge(momentum: float | None):
    with torch.device("meta"):
        branches = [
            nn.Sequential(nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4, momentum=momentum)).eval()
            for _ in range(2)
        ]
    merged = merge_parallel(branches)
    assert merged(torch.empty(2, 8, 3, 3, device="meta")).shape == (2, 8, 3, 3)
    copy.deepcopy(merged).to_empty(device="cpu")
