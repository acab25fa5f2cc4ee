"""The global average pool against adaptive pooling."""

import pytest
import torch
import torch.nn.functional as F

from tresnet.layers.global_pool import GlobalPool2d


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(2, 8, 7, 5), (1, 1, 1, 1), (3, 4, 1, 9)])
def test_equals_adaptive_pooling(shape, layout, jit):
    x = torch.randn(shape, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    expected = F.adaptive_avg_pool2d(x, 1)
    flat = GlobalPool2d("avg", jit)(x)
    torch.testing.assert_close(flat, expected.flatten(1))
    (grad,) = torch.autograd.grad(flat.sum(), x)
    torch.testing.assert_close(grad, torch.full_like(x, 1 / (shape[2] * shape[3])))
    assert grad.is_contiguous(memory_format=layout)  # so that convolutions need no copy
