"""Convolution, norm and activation, with or without anti-aliased downsampling."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tresnet.layers.blur_pool import BlurPool2d
from tresnet.layers.fusion import FusibleConv, is_own, runs_behind
from tresnet.layers.norm import ABN, norm_class
from tresnet.layers.squeeze_excite import SqueezeExcite
from tresnet.ops.dispatch import Impl


class ConvNormAct(FusibleConv):
    """k x k convolution without bias, norm, leaky ReLU; blur with stride 2 where asked.

    A norm of ours applies the activation. Where another is put in its place (synchronised, frozen,
    folded into the convolution), which cannot, this module does.
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
        """Create convolution, norm and, where `blur`, the downsampling.

        Args:
            in_channels: channels of the input.
            out_channels: channels of the output.
            kernel_size: odd side of the kernel; the border is padded with zeros.
            groups: of the convolution.
            norm: 'abn', 'batchnorm' or 'inplace_abn'.
            slope: negative slope of the leaky ReLU; None for no activation.
            blur: halve height and width by an anti-aliasing blur after the activation.
            jit: run the TorchScript form of the blur.
            device: where the parameters live.
            dtype: floating-point type of the parameters.
        """
        super().__init__()
        self.conv = nn.Conv2d(
            in_channels,
            out_channels,
            kernel_size,
            padding=kernel_size // 2,
            groups=groups,
            bias=False,
            device=device,
            dtype=dtype,
        )
        self.bn = norm_class(norm)(out_channels, slope, device=device, dtype=dtype)
        self.slope = slope
        self.aa = BlurPool2d(jit) if blur else nn.Identity()

    def _forward_plain(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        if self.slope is not None and not hasattr(self.bn, "slope"):
            y = F.leaky_relu(y, self.slope)
        return self.aa(y)

    @property
    def fused_impl(self) -> Impl | None:
        """Whose kernels may follow the convolution; None where the norm has none."""
        return self.bn.impl if isinstance(self.bn, ABN) and is_own(self.bn, ABN) else None

    def kernels_run(self, x: Tensor) -> bool:
        """Whether they run on what the convolution makes of `x`."""
        return isinstance(self.bn, ABN) and self.bn.kernels_run(x)

    def _run(
        self, x: Tensor, blur: bool, se: Any, shortcut: Tensor | None, keep_output: bool
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(self.bn, ABN)
        return self.bn.forward_fused(x, blur, se, shortcut, keep_output)

    def normalise_into(self, layer: FusibleConv, x: Tensor, se: nn.Module | None = None) -> Tensor:
        """The convolution of `layer` on what `normalise` returns, which nothing else reads."""
        if isinstance(self.aa, BlurPool2d) or not runs_behind(self.bn, layer.conv, x):
            return super().normalise_into(layer, x, se)
        assert isinstance(self.bn, ABN)
        assert isinstance(layer.conv, nn.Conv2d)
        weights = se.weights() if isinstance(se, SqueezeExcite) else None
        return self.bn.forward_fused(x, se=weights, conv=layer.conv)[0]
