"""Plain PyTorch definitions of the functions that `tresnet.ops.avg_pool` documents."""

import torch
import torch.nn.functional as F
from torch import Tensor


def avg_pool(x: Tensor) -> Tensor:
    """Average 2 x 2 squares of pixels; squares at the border may have fewer."""
    return F.avg_pool2d(x, 2, 2, ceil_mode=True, count_include_pad=False)


def add_avg_pool_grad(grad_x: Tensor, grad: Tensor) -> Tensor:
    """Add the gradient of the pool's input to `grad_x`, in place."""
    settings = [2, 2], [2, 2], [0, 0], True, False, None
    # the operator reads only the shape of the pool's input, which is that of its gradient
    return grad_x.add_(torch.ops.aten.avg_pool2d_backward(grad, grad_x, *settings))
