"""GroupedLinear: as many linear layers, in one product."""

import pytest
import torch
from torch import nn

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
