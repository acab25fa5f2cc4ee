"""A convolution with a folded batch norm, and its activation, for inference."""

import torch.nn.functional as F
from torch import Tensor, nn

from tresnet.errors import InputError


class FoldedConv(nn.Module):
    """Folded convolution, leaky ReLU (unless `slope` is None) and `aa` (a blur or the identity)."""

    def __init__(self, conv: nn.Conv2d, slope: float | None, aa: nn.Module) -> None:
        super().__init__()
        self.conv = conv
        self.slope = slope
        self.aa = aa
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in, H, W) to (N, out, H, W); a blur halves H and W, rounded up."""
        y = self.conv(x)
        if self.slope is not None:
            # work in place unless a forward hook of the convolution may have stored the output
            y = F.leaky_relu(y, self.slope, inplace=not self.conv._forward_hooks)
        return self.aa(y)

    def train(self, mode: bool = True) -> "FoldedConv":
        """Raise `InputError` if `mode` is true, because no norm is left to train."""
        if mode:
            raise InputError(
                "expected a model with its norms to train, got one folded for inference: train "
                "the model that was given to tresnet.surgery.fold, then fold it again"
            )
        return super().train(mode)
