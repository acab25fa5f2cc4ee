"""Residual blocks of TResNet (arXiv 2003.13630, section 2.4) and their skip connection."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tresnet.layers.conv_norm_act import ConvNormAct
from tresnet.layers.squeeze_excite import SqueezeExcite


@dataclass(frozen=True)
class BlockSettings:
    """Settings of a block, and constructors of the block's parts."""

    norm: str
    slope: float
    jit: bool
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    use_se: bool = True
    drop_path_rate: float = 0.0

    def conv(
        self, in_channels: int, out_channels: int, kernel: int, act: bool = True, blur: bool = False
    ) -> ConvNormAct:
        """Build a convolution with a norm, a leaky ReLU if `act`, and a stride-2 blur if `blur`."""
        kind: Any = {"norm": self.norm, "jit": self.jit, "device": self.device, "dtype": self.dtype}
        slope = self.slope if act else None
        return ConvNormAct(in_channels, out_channels, kernel, slope=slope, blur=blur, **kind)

    def skip(self, in_channels: int, out_channels: int, stride: int) -> nn.Module:
        """Build a pool (for stride 2), 1x1 convolution and norm; the identity for equal shapes."""
        if stride == 1 and in_channels == out_channels:
            return nn.Identity()
        layers: list[nn.Module] = []
        if stride == 2:  # if H or W is odd, the last windows average fewer pixels
            layers.append(nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False))
        layers.append(self.conv(in_channels, out_channels, 1, act=False))
        return nn.Sequential(*layers)

    def se(self, channels: int, reduced: int) -> nn.Module:
        """Build squeeze-and-excitation with max(`reduced`, 64) hidden channels, if `use_se`."""
        if not self.use_se:
            return nn.Identity()
        return SqueezeExcite(channels, max(reduced, 64), self.jit, self.device, self.dtype)

    def drop_path(self) -> nn.Module:
        """Build timm's module for stochastic depth (arXiv 1603.09382); the identity at rate 0."""
        if self.drop_path_rate == 0:
            return nn.Identity()
        from timm.layers.drop import DropPath

        return DropPath(self.drop_path_rate)


class BasicBlock(nn.Module):
    """Residual block of two 3x3 convolutions; with stride 2, a blur is between the two."""

    expansion = 1

    def __init__(self, in_channels: int, planes: int, stride: int, settings: BlockSettings) -> None:
        super().__init__()
        self.downsample = settings.skip(in_channels, planes, stride)
        self.conv1 = settings.conv(in_channels, planes, 3, blur=stride == 2)
        self.conv2 = settings.conv(planes, planes, 3, act=False)
        self.conv2.bn.zero_init()
        self.se = settings.se(planes, planes // 4)
        self.drop_path = settings.drop_path()

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, planes, ceil(H / stride), ceil(W / stride))."""
        shortcut = self.downsample(x)
        y = self.se(self.conv2(self.conv1(x)))
        return torch.relu_(self.drop_path(y) + shortcut)


class Bottleneck(nn.Module):
    """Residual block of 1x1, 3x3, 1x1 convolutions; with stride 2, a blur follows the 3x3 one."""

    expansion = 4

    def __init__(self, in_channels: int, planes: int, stride: int, settings: BlockSettings) -> None:
        super().__init__()
        out_channels = planes * self.expansion
        self.downsample = settings.skip(in_channels, out_channels, stride)
        self.conv1 = settings.conv(in_channels, planes, 1)
        self.conv2 = settings.conv(planes, planes, 3, blur=stride == 2)
        self.se = settings.se(planes, out_channels // 8)
        self.conv3 = settings.conv(planes, out_channels, 1, act=False)
        self.conv3.bn.zero_init()
        self.drop_path = settings.drop_path()

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, 4 planes, ceil(H / stride), ceil(W / stride))."""
        shortcut = self.downsample(x)
        y = self.conv3(self.se(self.conv2(self.conv1(x))))
        return torch.relu_(self.drop_path(y) + shortcut)
