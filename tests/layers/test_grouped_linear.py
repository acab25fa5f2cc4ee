"""GroupedLinear: as many linear layers, in one product."""

import pytest
import torch
from torch import nn

from tresnet.errors import InputError
from tresnet.layers.grouped_linear import GroupedLinear


@pytest.mark.parametrize("counts", [(4,), (3, 3, 3), (1, 5, 2), (7, 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_each_group_is_a_linear_layer(counts: tuple[int, ...], bias: bool):
    layer = GroupedLinear(6, counts, bias, dtype=torch.float64)
    x = torch.randn(5, len(counts), 6, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    parts = []
    for group, where in enumerate(torch.arange(sum(counts)).split(counts)):
        own = None if layer.bias is None else layer.bias[where]
        parts.append(nn.functional.linear(x[:, group], layer.weight[where], own))
    expected = torch.cat(parts, 1)
    tensors = [x, *layer.parameters()]
    probe = torch.randn_like(y)
    found = [y, *torch.autograd.grad(y, tensors, probe)]
    wanted = [expected, *torch.autograd.grad(expected, tensors, probe)]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    torch.testing.assert_close(layer(x.flatten(1)), y)


def test_initial_values_are_those_of_linear_layers():
    torch.manual_seed(0)
    layer = GroupedLinear(400, [100, 150])
    bound = 1 / 400**0.5
    for tensor in (layer.weight, layer.bias):
        assert tensor.abs().max() <= bound
        # a uniform distribution's deviation, within 5 standard errors of 250 draws
        assert tensor.std().item() == pytest.approx(bound / 3**0.5, rel=0.15)
    assert nn.Linear(400, 100).weight.abs().max() <= bound


@pytest.mark.parametrize(("features", "counts"), [(0, (1,)), (4, ()), (4, (2, 0)), (4, (2, -1))])
def test_impossible_sizes_are_refused(features: int, counts: tuple[int, ...]):
    with pytest.raises(InputError, match="at least one output for each group"):
        GroupedLinear(features, counts)
    assert GroupedLinear(1, (1,))(torch.ones(2, 1)).shape == (2, 1), "the smallest"
    with pytest.raises(InputError, match=r"\(N, 12\) or \(N, 3, 4\), got \(2, 8\)"):
        GroupedLinear(4, (1, 2, 3))(torch.zeros(2, 8))


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_are_taken_over(bias: bool):
    layers = [nn.Linear(8, n, bias) for n in (3, 1, 2)]
    x = torch.randn(4, 3, 8)
    expected = torch.cat([layer(x[:, group]) for group, layer in enumerate(layers)], 1)
    grouped = GroupedLinear.from_linears(layers)
    torch.testing.assert_close(grouped(x), expected)
    grouped.weight.data.zero_()
    assert layers[0].weight.any()
    with pytest.raises(InputError, match="differ only in their outputs"):
        GroupedLinear.from_linears([*layers, nn.Linear(7, 2, bias)])
    with pytest.raises(InputError, match="expected linear layers"):
        GroupedLinear.from_linears([])
