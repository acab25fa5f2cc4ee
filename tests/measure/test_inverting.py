"""The rival of abn computes what in-place ABN computes: by finite differences and by the package."""

import copy

import pytest
import torch
from torch import nn

from tests.live_storages import live_after
from tresnet.measure.inverting import (
    InplaceByPackage,
    InvertingABN,
    InvertingBatchNorm,
    invert_in,
)
from tresnet.models.zoo import build
from tresnet.ops.abn import abn

EPS = 1e-5


def step(function, x, weight, bias, grad):
    """Output, gradients and running statistics."""
    inputs = [one.clone().requires_grad_() for one in (x, weight, bias)]
    running = [torch.zeros_like(weight), torch.ones_like(weight)]
    y = function(*inputs, *running)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad), *running]


def inverting(slope, gamma="published", wide=True):
    return lambda *inputs: InvertingBatchNorm.apply(*inputs, 0.1, EPS, slope, gamma, wide)


def case(weights, dtype, layout=torch.contiguous_format):
    x, grad = torch.randn(2, 3, len(weights), 5, 4, dtype=torch.float64)
    bias = torch.linspace(-0.5, 0.7, len(weights), dtype=torch.float64)
    weight = torch.tensor(weights, dtype=torch.float64)
    maps = [one.to(dtype, memory_format=layout) for one in (x, grad)]
    vectors = [one.to(torch.promote_types(dtype, torch.float32)) for one in (weight, bias)]
    return maps[0], *vectors, maps[1]


@pytest.mark.parametrize("gamma", ["published", "plain"])
@pytest.mark.parametrize("slope", [1e-2, None])
def test_gradient_by_finite_differences(slope, gamma):
    x, weight, bias, _ = case([1.3, -0.4], torch.float64)

    def function(*inputs):
        running = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
        return inverting(slope, gamma)(*inputs, *running)

    inputs = [one.requires_grad_() for one in (x, weight, bias)]
    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("slope", [1e-2, 1e-3, None])
@pytest.mark.parametrize(
    ("dtype", "weights", "tolerance"),
    [
        (torch.float64, [1.0, -0.4, 0.0, 1e-3], 1e-6),  # the package's eps is a float32
        (torch.float32, [1.0, -0.4, 0.7, 0.2], 1e-4),
    ],
)
def test_equals_the_package(dtype, weights, tolerance, slope, layout):
    pytest.importorskip("inplace_abn", reason="the inplace-abn package is not installed")
    values = case(weights, dtype, layout)
    found = step(inverting(slope), *values)
    expected = step(InplaceByPackage(0.1, EPS, slope), *values)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_the_package_leaves_its_argument_alone():
    pytest.importorskip("inplace_abn", reason="the inplace-abn package is not installed")
    x, *rest = case([1.0, 0.5], torch.float32)
    function, before = InplaceByPackage(0.1, EPS, 1e-2), x.clone()
    with torch.no_grad():
        first = function(x, *rest[:2], torch.zeros(2), torch.ones(2)).clone()
    assert torch.equal(x, before)
    assert not torch.equal(first, before)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_near_ours_where_gamma_is_large(dtype, wide):
    values = case([1.0, -0.7], dtype)
    found = step(inverting(1e-2, "plain", wide), *values)
    ours = step(lambda *inputs: abn(*inputs, training=True, slope=1e-2), *values)
    assert [one.dtype for one in found] == [one.dtype for one in ours]
    assert torch.equal(found[0], ours[0])
    for one, other in zip(found[1:], ours[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_keeps_its_output_alone():
    """Of two convolutions with the norm between them, the first one's output goes."""
    convolutions = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3)
    norm, image = InvertingABN(4), torch.randn(2, 3, 8, 8)
    ignored = [image, *(p for module in (*convolutions, norm) for p in module.parameters())]
    kept = live_after(lambda: convolutions[1](norm(convolutions[0](image))), ignored)
    assert [shape for shape, _ in kept] == [(2, 4, 6, 6), (2, 5, 4, 4)]


def test_a_model_that_inverts_trains_alike():
    """Its weights w stand for |w| + eps in a model of ours."""
    ours = build("tresnet_t").double()
    for name, parameter in ours.named_parameters():
        if name.endswith("bn.weight"):
            nn.init.uniform_(parameter, 0.5, 1.5)
    theirs = invert_in(copy.deepcopy(ours))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("bn.weight"):
                parameter.sub_(EPS)
    assert any(isinstance(module, InvertingABN) for module in theirs.modules())
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    for model in (ours, theirs):
        model.train()(x).square().sum().backward()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-7, msg=name)
