"""Parallel bottleneck branches, run together by grouped convolutions."""

from typing import Any

import torch
from torch import Tensor, nn

from tresnet.errors import InputError
from tresnet.layers.conv_norm_act import ConvNormAct


class ParallelBottleneck(nn.Module):
    """G residual branches of a 1x1, a 3x3 and a 1x1 convolution, each with a norm.

    A branch has C = `channels` inputs and outputs, and C / r channels inside, with r = `reduction`.
    With `shared_input`, all branches read one input of C channels, and the first 1x1 is one dense
    convolution to G C / r channels. Otherwise the input has G C channels, C for each branch. A
    pixel costs 2 G C^2 / r + 9 G C^2 / r^2 multiply-accumulates. `norm` is 'abn', 'batchnorm' or
    'inplace_abn'. `slope` is the negative slope of the leaky ReLUs inside a branch.
    """

    def __init__(
        self,
        groups: int,
        channels: int,
        *,
        reduction: int = 2,
        shared_input: bool = True,
        norm: str = "abn",
        slope: float = 1e-3,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the layers; `reduction` must divide `channels`; `groups` must be at least 1."""
        super().__init__()
        if min(groups, channels, reduction) < 1 or channels % reduction:
            raise InputError(
                "expected groups, channels and reduction of at least 1, and channels divisible by "
                f"reduction, got groups={groups}, channels={channels}, reduction={reduction}"
            )
        self.groups, self.channels, self.shared_input = groups, channels, shared_input
        wide, middle = groups * channels, groups * (channels // reduction)
        same: Any = {"norm": norm, "device": device, "dtype": dtype}
        first = 1 if shared_input else groups
        self.conv1 = ConvNormAct(channels * first, middle, 1, groups=first, slope=slope, **same)
        self.conv2 = ConvNormAct(middle, middle, 3, groups=groups, slope=slope, **same)
        self.conv3 = ConvNormAct(middle, wide, 1, groups=groups, slope=None, **same)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W), or (N, G C, H, W) without `shared_input`, to (N, G C, H, W)."""
        expected = self.channels if self.shared_input else self.groups * self.channels
        if x.shape[1] != expected:
            raise InputError(f"expected {expected} channels, got {x.shape[1]}")
        y = self.conv3(self.conv2(self.conv1(x)))
        if self.shared_input:  # broadcasting avoids G copies of x
            y = (y.unflatten(1, [self.groups, self.channels]) + x.unsqueeze(1)).flatten(1, 2)
        else:
            y = y + x
        return torch.relu_(y)
