"""Means of 2 x 2 squares of pixels, before the convolution of a shortcut with stride 2.

Kernels run for an even height and width, where each square has four pixels.
"""

from torch import Tensor

from tresnet.ops.avg_pool import launch, reference


def avg_pool(x: Tensor) -> Tensor:
    """Average 2 x 2 squares of pixels of a channels_last map.

    `x` is (N, C, H, W) and not empty; the result is (N, C, ceil(H / 2), ceil(W / 2)) in its dtype
    and memory format. If H or W is odd, squares at the border have fewer pixels.
    """
    return (launch if _even(x) else reference).avg_pool(x)


def add_avg_pool_grad(grad_x: Tensor, grad: Tensor) -> Tensor:
    """Add the gradient of `x` in `avg_pool(x)` to `grad_x`, in place; return `grad_x`.

    `grad` is the gradient of the pool's output. It has the dtype of `grad_x`, and both are
    channels_last.
    """
    return (launch if _even(grad_x) else reference).add_avg_pool_grad(grad_x, grad)


def _even(x: Tensor) -> bool:
    return x.shape[2] % 2 == x.shape[3] % 2 == 0


__all__ = ["add_avg_pool_grad", "avg_pool"]
