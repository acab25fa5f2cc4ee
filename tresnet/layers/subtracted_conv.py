"""Three small convolutions without activation or bias, which replace one large convolution.

`SubtractedConv.replace_in` replaces convolutions of a model where this saves parameters. The model
must then be trained. After training, `to_conv` and `tresnet.surgery.compose` give plain
convolutions with equal outputs. The arithmetic is in `tresnet.ops.subtraction`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tresnet.errors import InputError
from tresnet.layers.hooks import check_model, find_hooks, replace_modules
from tresnet.ops import subtraction as op
from tresnet.ops.subtraction import MODES, Mode


class SubtractedConv(nn.Module):
    """Three convolutions P, D and L, which give concat(D(y) - y, L(y)) with y = P(x).

    P is a 1x1 convolution, D a depthwise k x k convolution, and L a dense k x k convolution. The
    three replace a k x k convolution of padding k // 2. For C input and 2 h output channels, P has
    C h parameters, D has h k^2, and L has h^2 k^2. `mode` affects only memory, time and rounding.

    With 'branches', three convolutions run, and y is saved for backward. With 'recompute', three
    convolutions run, and y and D(y) are computed again in backward. With 'composed', one
    convolution runs, with 2 h C k^2 multiply-accumulates per pixel. The weight of this convolution
    is computed from P, D and L in each forward, and again in backward.
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
        """Create an `nn.Conv2d` for each of P, D and L; only P has the stride.

        The first half of the output channels is D(P(x)) - P(x), and the second half is L(P(x)).
        The attribute `mode` can be changed later.
        """
        super().__init__()
        _check(in_channels, out_channels, kernel_size, stride, mode)
        half, border = out_channels // 2, kernel_size // 2
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = kernel_size
        self.stride = stride
        self.mode: Mode = mode
        factory_kwargs: Any = {"bias": False, "device": device, "dtype": dtype}
        self.point_wise = nn.Conv2d(in_channels, half, 1, stride, **factory_kwargs)
        self.depth_wise = nn.Conv2d(
            half, half, kernel_size, padding=border, groups=half, **factory_kwargs
        )
        self.low_pass = nn.Conv2d(half, half, kernel_size, padding=border, **factory_kwargs)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in, H, W) to (N, out, ceil(H / stride), ceil(W / stride))."""
        point, depth, low = self.point_wise.weight, self.depth_wise.weight, self.low_pass.weight
        return op.subtracted_conv(x, point, depth, low, self.stride, mode=self.mode)

    @torch.no_grad()
    def to_conv(self) -> nn.Conv2d:
        """Return one `nn.Conv2d` with equal outputs; the weight is computed in float64."""
        parts = (self.point_wise, self.depth_wise, self.low_pass)
        weight = op.compose(*(part.weight.double() for part in parts))
        own = self.point_wise.weight
        factory_kwargs: Any = {"bias": False, "device": own.device, "dtype": own.dtype}
        shape = self.in_channels, self.out_channels, self.kernel_size
        conv = nn.Conv2d(*shape, *op.geometry(self.kernel_size, self.stride), **factory_kwargs)
        conv.weight.copy_(weight)
        conv.weight.requires_grad_(own.requires_grad)
        return conv.train(self.training)

    @classmethod
    def replace_in(cls, model: nn.Module, mode: Mode = "composed") -> list[str]:
        """Replace convolutions of `model` in place by this class; return the convolutions' names.

        A convolution without bias, groups, dilation or hooks is replaced if a `SubtractedConv` of
        equal input and output shapes has fewer parameters. The new weights are random, so the model
        must be trained.

        In a ResNet50 of timm or torchvision, all sixteen 3x3 and sixteen of the 1x1 convolutions
        are replaced. Then 15.87 M of 25.56 M parameters remain.
        """
        check_model(model)
        named = list(model.named_modules(remove_duplicate=False))
        own = tuple(f"{name}." for name, module in named if isinstance(module, cls))
        replaced = {
            name: module
            for name, module in named
            if name and type(module) is nn.Conv2d and not name.startswith(own) and _fits(module)
        }
        if not replaced:
            raise InputError(
                f"expected convolutions inside {type(model).__name__} that a SubtractedConv can "
                "replace with fewer parameters (square odd kernel, padding kernel // 2, no "
                "dilation, groups, bias or hooks, even output channels), found none"
            )
        replace_modules(model, {conv: _counterpart(conv, mode) for conv in set(replaced.values())})
        return list(replaced)


def _fits(conv: nn.Conv2d) -> bool:
    kernel, half = conv.kernel_size[0], conv.out_channels // 2
    factors = half * (conv.in_channels + kernel**2 + half * kernel**2)
    return (
        conv.kernel_size == (kernel, kernel)
        and kernel % 2 == 1
        and conv.padding in ((kernel // 2, kernel // 2), "same")
        and (conv.padding_mode == "zeros" or kernel == 1)
        and conv.stride[0] == conv.stride[1]
        and (conv.dilation == (1, 1) or kernel == 1)
        and conv.groups == 1
        and conv.bias is None
        and conv.out_channels % 2 == 0
        and find_hooks([conv]) is None
        and factors < conv.weight.numel()
    )


def _counterpart(conv: nn.Conv2d, mode: Mode) -> SubtractedConv:
    shape = conv.in_channels, conv.out_channels, conv.kernel_size[0], conv.stride[0]
    factory_kwargs: Any = {"device": conv.weight.device, "dtype": conv.weight.dtype}
    new = SubtractedConv(*shape, mode=mode, **factory_kwargs)
    return new.train(conv.training).requires_grad_(conv.weight.requires_grad)


def _check(in_channels: int, out_channels: int, kernel_size: int, stride: int, mode: str) -> None:
    for valid, expected, value in (
        (in_channels > 0, "in_channels of at least 1", in_channels),
        (stride > 0, "a stride of at least 1", stride),
        (out_channels > 1 and out_channels % 2 == 0, "an even out_channels", out_channels),
        (kernel_size > 0 and kernel_size % 2, "an odd kernel_size", kernel_size),
        (mode in MODES, f"mode out of {', '.join(MODES)}", repr(mode)),
    ):
        if not valid:
            raise InputError(f"expected {expected}, got {value}")
