"""Global pooling before the classifier."""

from typing import get_args

import torch
from torch import Tensor, nn

from tresnet.errors import check_known
from tresnet.layers.symbolic import symbolic
from tresnet.ops.scripted import scripted_if
from tresnet.settings.model import GlobalPool


def fast_avg_pool(x: Tensor) -> Tensor:
    """Average each channel of (N, C, H, W) over all pixels, as in arXiv 2003.13630 ("fast")."""
    return x.mean(dim=[2, 3])


def avg_pool_of_channels_last(x: Tensor) -> Tensor:
    """Compute `fast_avg_pool` so that autograd writes the gradient in channels_last memory."""
    return x.permute(0, 2, 3, 1).mean(dim=[1, 2])


class GlobalPool2d(nn.Module):
    """Pooling of each channel over all pixels, from (N, C, H, W) to (N, C).

    `pool_type` is 'avg' or timm's name 'fast' (average), 'max' (maximum), 'avgmax' (the mean of
    average and maximum) or '' (the input is returned unchanged). Other values raise `InputError`.
    With `jit`, TorchScript compiles the average.
    """

    def __init__(self, pool_type: str = "avg", jit: bool = False) -> None:
        super().__init__()
        check_known("global pool", pool_type, get_args(GlobalPool))
        self.pool_type = pool_type
        self.jit = jit

    def _avg_pool(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return fast_avg_pool(x)
        if torch.compiler.is_compiling() or symbolic(x):
            return fast_avg_pool(x)
        pool = avg_pool_of_channels_last if x.stride(1) == 1 else fast_avg_pool
        return scripted_if(self.jit, pool)(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.pool_type == "":
            return x
        if self.pool_type == "max":
            return x.amax(dim=[2, 3])
        if self.pool_type == "avgmax":
            return (self._avg_pool(x) + x.amax(dim=[2, 3])) / 2
        return self._avg_pool(x)
