"""Anti-aliased downsampling by a blur (arXiv 2003.13630, section 2.2)."""

import torch
from torch import Tensor, nn

from tresnet.layers.symbolic import record_call, symbolic
from tresnet.ops import blur


class BlurPool2d(nn.Module):
    """A 3x3 binomial blur with stride 2 and reflected border; halves H and W, rounded up."""

    def __init__(self, jit: bool) -> None:
        super().__init__()
        self.jit = jit

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return blur.blur_by_convolution(x)
        if symbolic(x):
            return record_call(self, x)
        return blur.blur_pool(x, jit=self.jit)
