"""Convolution, norm and activation, with or without anti-aliased downsampling."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tresnet.layers.blur_pool import BlurPool2d
from tresnet.layers.fusion import runs_behind, runs_fused
from tresnet.layers.norm import ABN, norm_class
from tresnet.layers.squeeze_excite import SqueezeExcite


class ConvNormAct(nn.Module):
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

    def forward(self, x: Tensor) -> Tensor:
        """(N, in, H, W) to (N, out, H, W), or to half the height and width, rounded up."""
        if torch.jit.is_scripting():
            return self._forward_plain(x)
        return self._forward_eager(x)

    def _forward_plain(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        if self.slope is not None and not hasattr(self.bn, "slope"):
            y = F.leaky_relu(y, self.slope)
        return self.aa(y)

    @torch.jit.unused
    def _forward_eager(self, x: Tensor) -> Tensor:
        if not runs_fused(x, [self]):
            return self._forward_plain(x)
        return self.normalise(self.conv(x))[0]

    def normalise(
        self,
        x: Tensor,
        se: nn.Module | None = None,
        shortcut: Tensor | None = None,
        keep_output: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Run what follows the convolution, also in a block, in fused kernels.

        Only where `tresnet.layers.fusion` has said that they run.

        Args:
            x: (N, out, H, W), the convolution's output.
            se: applied after the blur.
            shortcut: what is added in front of a ReLU; None for neither.
            keep_output: False lets backward rebuild the output of the ReLU.

        Returns:
            The output, twice, as `tresnet.ops.abn.fused_abn` does.
        """
        assert isinstance(self.bn, ABN)
        blur = isinstance(self.aa, BlurPool2d)
        weights = se.weights() if isinstance(se, SqueezeExcite) else None
        if shortcut is not None and (blur or shortcut.dtype != x.dtype):
            y = torch.relu_(self.bn.forward_fused(x, blur, weights)[0] + shortcut)
            return y, y
        return self.bn.forward_fused(x, blur, weights, shortcut, keep_output)

    def normalise_into(self, conv: nn.Module, x: Tensor, se: nn.Module | None = None) -> Tensor:
        """`conv` of what `normalise` returns, which nothing else reads."""
        if isinstance(self.aa, BlurPool2d) or not runs_behind(self.bn, conv, x):
            return conv(self.normalise(x, se)[0])
        assert isinstance(self.bn, ABN)
        assert isinstance(conv, nn.Conv2d)
        weights = se.weights() if isinstance(se, SqueezeExcite) else None
        return self.bn.forward_fused(x, se=weights, conv=conv)[0]
