"""Composition of linear convolutions: exact where allowed, refused where not."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from tresnet.errors import InputError
from tresnet.layers.subtracted_conv import SubtractedConv
from tresnet.surgery.composing import compose, compose_cat, compose_sum

SIZES = [(14, 15), (13, 16)]


def conv(*args: int, **options: object) -> nn.Conv2d:
    return nn.Conv2d(*args, dtype=torch.float64, **options)


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    for size in SIZES:
        x = torch.randn(2, 4, *size, dtype=torch.float64)
        torch.testing.assert_close(found(x), expected(x), rtol=0, atol=1e-10)


class Added(nn.Module):
    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return sum(b(x) for b in self.branches)


class Joined(nn.Module):
    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, inputs, y: 2 * y)
    return module


@pytest.mark.parametrize(("ka", "kb"), list(itertools.product((1, 2, 3), (1, 3))))
def test_a_second_without_padding_composes_exactly(ka: int, kb: int):
    for sa, sb, pa, da, db, bias in itertools.product(
        (1, 2), (1, 3), (0, 1), (1, 2), (1, 2), (0, 1)
    ):
        a = conv(4, 6, ka, sa, pa, da, bias=bool(bias))
        b = conv(6, 3, kb, sb, 0, db, bias=not bias)
        assert_same(compose(a, b), nn.Sequential(a, b))


@pytest.mark.parametrize(
    ("ka", "sa", "da"), [(1, 1, 1), (1, 3, 1), (3, 1, 1), (3, 2, 2), (2, 2, 1)]
)
def test_full_padding_of_the_first_makes_padding_of_the_second_exact(ka: int, sa: int, da: int):
    for kb, sb, db, pb in itertools.product((1, 3), (1, 2), (1, 2), (1, 2)):
        a = conv(4, 6, ka, sa, da * (ka - 1), da, bias=False)
        b = conv(6, 3, kb, sb, pb, db)
        assert_same(compose(a, b), nn.Sequential(a, b))


@pytest.mark.parametrize(("ga", "gb"), [(1, 2), (2, 1), (2, 2), (4, 2), (2, 4), (4, 4)])
def test_groups_are_kept_as_far_as_both_have_them(ga: int, gb: int):
    a, b = conv(4, 8, 3, groups=ga), conv(8, 12, 3, groups=gb)
    whole = compose(a, b)
    assert whole.groups == min(ga, gb)
    assert_same(whole, nn.Sequential(a, b))


def test_three_in_a_row_with_nested_sequentials_and_rectangles():
    a, b = conv(4, 5, (1, 3), padding=(0, 2), bias=False), conv(5, 3, (3, 1), (2, 1), (0, 1))
    c = conv(3, 2, 1)
    chain = nn.Sequential(nn.Sequential(a, nn.Identity()), b)
    assert_same(compose(chain, c), nn.Sequential(chain, c))
    assert compose(chain, c).kernel_size == (3, 3)


def test_a_convolution_that_comes_twice_counts_twice():
    a, b = conv(4, 4, 3), conv(4, 2, 1)
    chain = nn.Sequential(a, a)
    assert_same(compose(chain, b), nn.Sequential(chain, b))


def test_a_smaller_common_grid_is_used():
    whole = compose(conv(4, 6, 1, 2, bias=False), conv(6, 3, 3, padding=1))
    assert whole.kernel_size == (3, 3)
    assert whole.dilation == (2, 2)
    assert whole.padding == (2, 2)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (
            conv(4, 6, 3, padding=1, bias=False),
            conv(6, 3, 3, padding=1),
            "part 0.*still see pixels",
        ),
        (conv(4, 6, 1), conv(6, 3, 3, padding=1), "would give its bias"),
        (conv(4, 6, 1, bias=False), conv(6, 3, 3, padding=1, padding_mode="reflect"), "'reflect'"),
    ],
)
def test_an_inexact_border_is_refused(a: nn.Module, b: nn.Module, message: str):
    with pytest.raises(InputError, match=message):
        compose(a, b)


def test_a_sum_is_one_convolution():
    branches = [
        conv(4, 4, 3, padding=1),
        conv(4, 4, 1, bias=False),
        conv(4, 4, 5, padding=2, groups=2),
        conv(4, 4, 3, padding=2, dilation=2),
        nn.Identity(),
    ]
    assert_same(compose_sum(*branches), Added(*branches))


def test_a_sum_keeps_common_groups_and_a_coarse_grid():
    branches = [conv(4, 8, 3, padding=2, dilation=2, groups=4), conv(4, 8, 1, groups=2)]
    whole = compose_sum(*branches)
    assert (whole.groups, whole.kernel_size, whole.dilation) == (2, (3, 3), (2, 2))
    assert_same(whole, Added(*branches))


def test_a_concatenation_is_one_convolution():
    branches = [conv(4, 3, 3, 2, 1), conv(4, 4, 1, 2, groups=2), conv(4, 2, 5, 2, 2, bias=False)]
    whole = compose_cat(*branches)
    assert_same(whole, Joined(*branches))
    assert whole.bias is not None
    assert not whole.bias[-2:].any()
    assert compose_cat(branches[2], branches[2]).bias is None


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_the_documents_module_follows_from_the_general_rules(stride: int):
    module = SubtractedConv(4, 6, 3, stride, dtype=torch.float64)
    p, d, low = module.point_wise, module.depth_wise, module.low_pass
    less = conv(4, 3, 1, stride, bias=False)
    less.weight = nn.Parameter(-p.weight)
    upper = compose_sum(nn.Sequential(p, d), less)
    assert_same(compose_cat(upper, nn.Sequential(p, low)), module)
    torch.testing.assert_close(
        compose_cat(upper, nn.Sequential(p, low)).weight, module.to_conv().weight
    )
    last = conv(6, 2, 1)
    assert_same(compose(module, last), nn.Sequential(module, last))


def test_the_result_has_the_first_parts_dtype_and_trainability():
    a, b = nn.Conv2d(4, 6, 1, bias=False), nn.Conv2d(6, 3, 3, padding=1)
    assert compose(a, b).weight.dtype == torch.float32
    assert compose(a.requires_grad_(False), b).bias.requires_grad is False


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compose(conv(4, 6, 1), nn.ReLU()), "part 1 is ReLU"),
        (
            lambda: compose(nn.Sequential(conv(4, 6, 1), nn.BatchNorm2d(6)), conv(6, 2, 1)),
            r"part 0\.1 is BatchNorm2d",
        ),
        (lambda: compose(conv(4, 6, 1), conv(5, 2, 1)), "gives 6 channels, but part 1.*takes 5"),
        (lambda: compose(nn.Identity(), nn.Identity()), "identities alone"),
        (lambda: compose_sum(conv(4, 6, 1), nn.Tanh()), "branch 1 is Tanh"),
        (lambda: compose_sum(conv(4, 6, 1), conv(4, 5, 1)), "branch 0.* 6, branch 1.* 5"),
        (lambda: compose_sum(conv(4, 6, 1), nn.Identity()), "branch 0.* 6, branch 1 has 4"),
        (lambda: compose_sum(conv(4, 6, 1), conv(4, 6, 3)), "differ in .*kernel - 1.*branch 1"),
        (
            lambda: compose_cat(conv(4, 6, 1), conv(4, 6, 1, 2)),
            "differ in channels, stride.* branch 1",
        ),
        (
            lambda: compose_cat(conv(4, 6, 1), conv(3, 6, 1)),
            "differ in channels.*branch 0.* has .4.*branch 1",
        ),
        (lambda: compose_sum(), "at least one branch"),
        (
            lambda: compose_sum(conv(4, 6, 3, padding=1, padding_mode="reflect")),
            "branch 0.*'reflect'",
        ),
        (
            lambda: compose(conv(4, 6, 2, padding="same"), conv(6, 2, 1)),
            "part 0.*expected as many zeros",
        ),
        (lambda: compose(Residual(conv(4, 4, 1)), conv(4, 2, 1)), "part 0 is Residual"),
        (lambda: compose(conv(4, 6, 1), hooked(conv(6, 2, 1))), r"part 1 .Conv2d. has hooks"),
        (
            lambda: compose(nn.Conv2d(4, 6, 1, dtype=torch.complex64), conv(6, 2, 1)),
            "real .* but part 0",
        ),
        (lambda: compose(conv(4, 6, 1), conv(6, 2, 1, device="meta")), "part 0.*cpu.*part 1.*meta"),
        (lambda: compose_sum(conv(4, 6, 1), conv(4, 6, 1, device="meta")), "branch 1.*meta"),
        (
            lambda: compose(*(conv(4, 4, 1, device="meta"), conv(4, 4, 3, 1, 1, device="meta"))),
            "would give its bias",
        ),
    ],
)
def test_bad_input_names_the_part(call: object, message: str):
    with pytest.raises(InputError, match=message):
        call()
