"""A convolution replaced by three smaller linear ones, or by the one they amount to."""

from typing import Any

import torch
from torch import Tensor, nn

from tresnet.errors import InputError
from tresnet.ops import subtracted_conv as op
from tresnet.ops.subtracted_conv import MODES, Mode


class SubtractedConv(nn.Module):
    """1x1 P; depthwise D minus identity, and dense L, on its output; concatenated. No bias.

    Takes the place of a k x k convolution with padding k // 2. Parameters, with C channels in and
    2 h out: C h + h k^2 + h^2 k^2. Modes share the parameters and the function and differ in memory
    and time: 'branches' runs three convolutions and keeps P x for backward; 'composed' runs one,
    of 2 h C k^2 multiply-accumulates a pixel, with a weight computed from P, D and L at every
    forward; 'recompute' runs the three and computes P x and D P x again in backward.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        *,
        mode: Mode = "composed",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the three convolutions, initialised as `nn.Conv2d`.

        Args:
            in_channels: channels of the input (N, C, H, W).
            out_channels: channels of the output, even: half from D P - P, half from L P.
            kernel_size: odd side of the kernels of D and L.
            stride: of P, in both directions.
            mode: 'branches', 'composed' or 'recompute'; may be changed later.
            device: where the parameters live.
            dtype: floating-point type of the parameters.

        Raises:
            InputError: a size or the mode is not possible.
        """
        super().__init__()
        _check(in_channels, out_channels, kernel_size, stride, mode)
        half, border = out_channels // 2, kernel_size // 2
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = kernel_size
        self.stride = stride
        self.mode: Mode = mode
        place: Any = {"bias": False, "device": device, "dtype": dtype}
        self.point_wise = nn.Conv2d(in_channels, half, 1, stride, **place)
        self.depth_wise = nn.Conv2d(half, half, kernel_size, padding=border, groups=half, **place)
        self.low_pass = nn.Conv2d(half, half, kernel_size, padding=border, **place)

    def forward(self, x: Tensor) -> Tensor:
        """(N, in, H, W) to (N, out, ceil(H / stride), ceil(W / stride))."""
        point, depth, low = self.point_wise.weight, self.depth_wise.weight, self.low_pass.weight
        if torch.jit.is_scripting():
            return op.composed(x, point, depth, low, self.stride)
        return op.subtracted_conv(x, point, depth, low, self.stride, mode=self.mode)

    @torch.no_grad()
    def to_conv(self) -> nn.Conv2d:
        """Return one plain convolution with the same outputs, its weight composed in float64."""
        parts = (self.point_wise, self.depth_wise, self.low_pass)
        weight = op.compose(*(part.weight.double() for part in parts))
        own = self.point_wise.weight
        conv = nn.Conv2d(
            self.in_channels,
            self.out_channels,
            self.kernel_size,
            *op.geometry(self.kernel_size, self.stride),
            bias=False,
            device=own.device,
            dtype=own.dtype,
        )
        conv.weight.copy_(weight)
        conv.weight.requires_grad_(own.requires_grad)
        return conv.train(self.training)

    def extra_repr(self) -> str:
        """Return the settings for `repr`."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, mode={self.mode!r}"
        )


def _check(in_channels: int, out_channels: int, kernel_size: int, stride: int, mode: str) -> None:
    if in_channels < 1 or stride < 1:
        raise InputError(
            f"expected in_channels and stride of at least 1, got {in_channels} and {stride}"
        )
    if out_channels < 2 or out_channels % 2:
        raise InputError(
            f"expected an even out_channels, half from each branch, got {out_channels}"
        )
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise InputError(
            f"expected an odd kernel_size, so that D P x and P x have one size, got {kernel_size}"
        )
    if mode not in MODES:
        raise InputError(f"expected mode out of {', '.join(MODES)}, got {mode!r}")
