"""Convolution, norm and activation, with or without anti-aliased downsampling."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tresnet.layers.blur_pool import BlurPool2d
from tresnet.layers.norm import norm_class


class ConvNormAct(nn.Module):
    """A k x k convolution without bias, a norm, a leaky ReLU and, if `blur`, a blur.

    The convolution pads each side by k // 2. If `slope` is None, there is no activation. With
    `jit`, TorchScript compiles the blur. A norm of this package applies the activation itself. If
    the norm is replaced, for example by `SyncBatchNorm`, this module applies the activation.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        groups: int = 1,
        norm: str = "abn",
        slope: float | None = 1e-3,
        blur: bool = False,
        jit: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory_kwargs: Any = {"device": device, "dtype": dtype}
        self.conv = nn.Conv2d(
            in_channels, out_channels, kernel_size, padding=kernel_size // 2, groups=groups,
            bias=False, **factory_kwargs,
        )  # fmt: skip
        self.bn = norm_class(norm)(out_channels, slope, **factory_kwargs)
        self.slope = slope
        self.aa = BlurPool2d(jit) if blur else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in, H, W) to (N, out, H, W); a blur halves H and W, rounded up."""
        y = self.bn(self.conv(x))
        if self.slope is not None and not hasattr(self.bn, "slope"):
            y = F.leaky_relu(y, self.slope)
        return self.aa(y)
