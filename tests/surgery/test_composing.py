"""Composition of linear convolutions: exact where allowed, refused where not."""

import itertools

import pytest
import torch
from torch import nn

from tests.layers.test_subtracted_conv import small
from tresnet.layers.subtracted_conv import SubtractedConv
from tresnet.surgery.composing import compose

SIZES = [(14, 15), (13, 16)]


def conv(*args: int, **options: object) -> nn.Conv2d:
    return nn.Conv2d(*args, dtype=torch.float64, **options)


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    for size in SIZES:
        x = torch.randn(2, 4, *size, dtype=torch.float64)
        torch.testing.assert_close(found(x), expected(x), rtol=0, atol=1e-10)


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


TWICE = conv(4, 4, 3)
NESTED = nn.Sequential(
    nn.Sequential(conv(4, 5, 3, padding=(0, 2), bias=False), nn.Identity()),
    conv(5, 3, (3, 1), (2, 1), (0, 1)),
)


@pytest.mark.parametrize(
    "parts",
    [
        *((conv(4, 8, 3, groups=a), conv(8, 12, 3, groups=b)) for a, b in ((1, 2), (4, 2), (4, 4))),
        (nn.Sequential(TWICE, TWICE), conv(4, 2, 1)),
        (NESTED, conv(3, 2, 1)),
        (conv(4, 6, (1, 3), padding=(0, 2), bias=False), conv(6, 3, 3, padding=1)),
    ],
    ids=["groups 1, 2", "groups 4, 2", "groups 4, 4", "twice", "nested", "rectangle"],
)
def test_chains_compose_exactly(parts: tuple[nn.Module, ...]):
    assert_same(compose(*parts), nn.Sequential(*parts))


def test_a_smaller_common_grid_is_used():
    a, b = conv(4, 6, 1, (2, 1), bias=False), conv(6, 3, 3, padding=1)
    composed = compose(a, b)
    assert (composed.kernel_size, composed.dilation, composed.padding) == ((3, 3), (2, 1), (2, 1))
    assert_same(composed, nn.Sequential(a, b))
    assert compose(NESTED, conv(3, 2, 1)).kernel_size == (5, 3)


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_the_documents_module_is_a_part_like_others(stride: int):
    module, last = SubtractedConv(4, 6, 3, stride, dtype=torch.float64), conv(6, 2, 1)
    for parts in ([module], [module, last], [nn.Sequential(module, last)]):
        assert_same(compose(*parts), nn.Sequential(*parts))


def test_a_model_keeps_its_outputs_and_gets_plain_convolutions():
    model = small().double().eval()
    SubtractedConv.replace_in(model)
    x = torch.randn(2, 3, 9, 11, dtype=torch.float64)
    expected = model(x)
    assert compose(model) is model
    assert not any(isinstance(m, SubtractedConv) for m in model.modules())
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-10)


def test_a_shared_convolution_stays_shared():
    conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
    model = nn.Sequential(conv, nn.ReLU(), nn.Sequential(conv))
    assert SubtractedConv.replace_in(model) == ["0", "2.0"]
    assert model[0] is model[2][0]
    compose(model)
    assert model[0] is model[2][0]
    assert type(model[0]) is nn.Conv2d


def test_the_result_has_the_first_parts_dtype_and_trainability():
    a, b = nn.Conv2d(4, 6, 1, bias=False), nn.Conv2d(6, 3, 3, padding=1)
    assert compose(a, b).weight.dtype == torch.float32
    assert compose(a.requires_grad_(False), b).bias.requires_grad is False
    assert compose(a, conv(6, 2, 1, bias=False)).dilation == (1, 1)
