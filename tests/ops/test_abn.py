"""Activated batch norm against torch's modules in fp64, and what it keeps for backward."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.ops.operation import abn
from tresnet.errors import InputError
from tresnet.ops.abn.cases import CASES

LAYOUTS = [torch.contiguous_format, torch.channels_last]


def parameters(channels, dtype):
    """Gammas of both signs, among them zero and tiny ones; betas; running statistics."""
    weight, bias = torch.randn(2, channels, dtype=dtype)
    weight[0] = 0
    weight[-1] *= 1e-6
    return weight, bias, torch.randn(channels, dtype=dtype), torch.rand(channels, dtype=dtype) + 0.5


def run(x, weight, bias, mean, var, grad, training, slope, impl, **group):
    """Return output, gradients of x, weight and bias, and the running statistics afterwards."""
    x, weight, bias = (t.clone().requires_grad_() for t in (x, weight, bias))
    mean, var = mean.clone(), var.clone()
    y = abn(x, weight, bias, mean, var, training=training, slope=slope, impl=impl, **group)
    y.backward(grad)
    return [y.detach(), x.grad, weight.grad, bias.grad, mean, var]


def truth(x, weight, bias, mean, var, grad, training, slope):
    """Do the same with torch's own BatchNorm module and leaky ReLU, in fp64."""
    kind = nn.BatchNorm2d if x.dim() == 4 else nn.BatchNorm1d
    module = kind(len(weight), dtype=torch.float64).train(training)
    values = {"weight": weight, "bias": bias, "running_mean": mean, "running_var": var}
    module.load_state_dict({**values, "num_batches_tracked": torch.tensor(0)})
    x = x.double().requires_grad_()
    y = module(x)
    y = y if slope is None else F.leaky_relu(y, slope)
    y.backward(grad.double())
    grads = [x.grad, module.weight.grad, module.bias.grad]
    return [y.detach(), *grads, module.running_mean, module.running_var]


@pytest.mark.parametrize("impl", ["reference", "launches"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["nchw", "nhwc"])
@pytest.mark.parametrize(("shape", "slope"), CASES.values(), ids=CASES)
def test_equals_torch_in_fp64(shape, slope, layout, training, impl):
    x, grad = torch.randn(2, *shape, dtype=torch.float64)
    if len(shape) == 4:
        x, grad = x.to(memory_format=layout), grad.to(memory_format=layout)
    values = (x, *parameters(shape[1], torch.float64), grad, training, slope)
    for ours, expected in zip(run(*values, impl), truth(*values), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slope", [1e-2, 1e-6, None])
def test_loses_no_more_than_eager_pytorch(dtype, slope):
    """Every output may be off from fp64 by as much as plain PyTorch is in the same dtype."""
    x, grad = torch.randn(2, 8, 16, 9, 7).to(dtype)
    values = (x, *parameters(16, torch.float32), grad, True, slope)
    wide = [v.double() if isinstance(v, torch.Tensor) else v for v in values]
    reference, ours = run(*values, "reference"), run(*values, "launches")
    for ours_i, eager, exact in zip(ours, reference, truth(*wide), strict=True):
        # The longest chain, of the input's gradient, rounds eight times by half an eps: mask,
        # scale, x - mean, its factor, two sums, and the two factors' own products.
        allowed = 4 * torch.finfo(torch.float32).eps * exact.abs().max()
        allowed += (eager.double() - exact).abs().max()
        assert (ours_i.double() - exact).abs().max() <= allowed


@pytest.mark.parametrize("count", [3, 5])
def test_processes_of_a_group_synchronise_their_statistics(count, monkeypatch):
    """Two threads stand in for processes, which are their groups' names; one may have no images."""
    x, grad = torch.randn(2, 5, 4, 3, 3, dtype=torch.float64)
    vectors = parameters(4, torch.float64)
    wait, given = threading.Barrier(2).wait, {}

    def gathered(own, rank):
        given[rank] = own.clone()
        wait()
        parts = torch.stack((given[0], given[1]))
        wait()
        return parts

    def gather(out, own, group):
        out.copy_(gathered(own, group).flatten())

    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: x.copy_(gathered(x, group).sum(0)))

    def process(rank):
        part = (slice(count), slice(count, None))[rank]
        return run(x[part], *vectors, grad[part], True, 1e-2, "launches", group=rank)

    with ThreadPoolExecutor(2) as threads:
        ranks = list(threads.map(process, range(2)))
    joined = [torch.cat] * 2 + [sum] * 2 + [lambda found: found[1]] * 2
    expected = run(x, *vectors, grad, True, 1e-2, "reference")
    for join, found, value in zip(joined, zip(*ranks, strict=True), expected, strict=True):
        torch.testing.assert_close(join(found), value, rtol=1e-10, atol=1e-10)


def test_one_value_per_channel_is_an_error():
    with pytest.raises(InputError, match="more than one value per channel"):
        abn(torch.randn(1, 4, 1, 1), *parameters(4, torch.float32), training=True)
    y = abn(torch.randn(1, 4, 1, 1), *parameters(4, torch.float32), training=False)
    assert y.shape == (1, 4, 1, 1)


@pytest.mark.parametrize("impl", ["reference", "triton", "launches"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(0, 4, 3, 3), (2, 4, 0, 3)])
def test_no_values_give_none_and_change_nothing(shape, training, impl):
    """Behave as PyTorch's batch norm, forward and backward."""
    x = torch.randn(shape, requires_grad=True)
    weight, bias, mean, var = parameters(4, torch.float32)
    weight.requires_grad_()
    before = mean.clone(), var.clone()
    y = abn(x, weight, bias, mean, var, training=training, impl=impl)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape
    assert torch.equal(weight.grad, torch.zeros(4))
    assert torch.equal(mean, before[0])
    assert torch.equal(var, before[1])


@pytest.mark.parametrize("impl", ["reference", "launches"])
def test_a_negative_slope_has_gradients(impl):
    """The activation is no longer invertible: in place, PyTorch refuses its gradient."""
    x = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def function(x, weight, bias):
        running = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        return abn(x, weight, bias, *running, training=True, slope=-0.5, impl=impl)

    assert torch.autograd.gradcheck(function, (x, weight, bias))


@pytest.mark.parametrize("impl", ["triton", "launches"])
def test_a_map_too_small_for_a_blur_is_an_error(impl):
    with pytest.raises(InputError, match="H and W at least 2"):
        abn(
            torch.randn(2, 4, 1, 5),
            *parameters(4, torch.float32),
            training=True,
            blur=True,
            impl=impl,
        )


@pytest.mark.parametrize("count", [0, 1])
def test_at_most_one_value_in_all_processes_leaves_finite_statistics(count, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda out, own, group: out.copy_(own))
    weight, bias, mean, var = parameters(4, torch.float32)
    x, before = torch.randn(count, 4, 1, 1), (mean.clone(), var.clone())
    abn(x, weight, bias, mean, var, training=True, group=0, impl="launches")
    for old, new in zip(before, (mean, var), strict=True):
        assert new.isfinite().all()
        assert torch.equal(old, new) == (count == 0)
