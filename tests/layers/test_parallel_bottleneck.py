"""ParallelBottleneck: grouped convolutions that equal as many branches."""

import pytest
import torch
from torch import nn

from tresnet.layers.parallel_bottleneck import ParallelBottleneck

G, C = 3, 8


def branches_of(merged: ParallelBottleneck) -> nn.ModuleList:
    """Return modules of one group each, with slices of the tensors of `merged`."""
    branches = nn.ModuleList(
        ParallelBottleneck(1, C, shared_input=True, dtype=torch.float64) for _ in range(G)
    )
    for name, tensor in merged.state_dict().items():
        parts = tensor.chunk(G) if tensor.dim() else [tensor] * G
        for branch, part in zip(branches, parts, strict=True):
            branch.state_dict()[name].copy_(part)
    return branches


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", ["abn", "batchnorm"])
def test_the_module_equals_its_branches(shared: bool, training: bool, norm: str):
    merged = ParallelBottleneck(G, C, shared_input=shared, norm=norm, dtype=torch.float64)
    branches = branches_of(merged).train(training)
    merged.train(training)
    x = torch.randn(2, C if shared else G * C, 5, 7, dtype=torch.float64, requires_grad=True)
    inputs = [x] * G if shared else x.chunk(G, 1)
    y = merged(x)
    expected = torch.cat([b(part) for b, part in zip(branches, inputs, strict=True)], 1)
    probe = torch.randn_like(y)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-10)
    of_x, exact = (torch.autograd.grad(result, x, probe) for result in (y, expected))
    torch.testing.assert_close(of_x, exact, rtol=0, atol=1e-10)
