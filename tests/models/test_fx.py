"""Whole models recorded by plain `torch.fx.symbolic_trace`."""

import pytest
import torch

from tests.toys import NEEDS_PACKAGE, small


@pytest.mark.filterwarnings("ignore:The TorchScript type system")  # of fx's own GraphModule
@pytest.mark.parametrize(
    ("norm", "options"),
    [
        ("abn", {}),
        ("batchnorm", {"jit": True, "global_pool": "avgmax"}),
        pytest.param("inplace_abn", {}, marks=NEEDS_PACKAGE),
        ("abn", {"head": "ml_decoder"}),
        ("abn", {"head": "group_attention", "head_groups": [2, 3]}),
    ],
    ids=str,
)
def test_a_traced_model_is_the_model_with_its_gradients_and_scripts(norm, options):
    model = small(norm=norm, **options).train()
    graph = torch.fx.symbolic_trace(model)
    x = torch.rand(2, 3, 64, 96)
    model.eval()  # whose modules the graph calls
    expected = model(x)
    assert torch.equal(graph.eval()(x), expected)
    assert graph(torch.rand(3, 3, 64, 64)).shape == (3, 5)  # no size is fixed
    if "head" not in options:
        scripted = torch.jit.script(graph)
        torch.testing.assert_close(scripted(x), expected, rtol=1e-5, atol=1e-5)
    gradients = []
    for called in (model, graph):
        state = {key: value.clone() for key, value in model.state_dict().items()}
        torch.manual_seed(0)  # of dropout
        called.train()(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        model.load_state_dict(state)  # the running statistics
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
