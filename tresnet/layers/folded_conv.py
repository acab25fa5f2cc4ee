"""Convolution and activation with the norm folded in, for inference."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from tresnet.errors import InputError
from tresnet.layers.fusion import FusibleConv
from tresnet.layers.watched import is_watched
from tresnet.ops.abn import shift
from tresnet.ops.dispatch import Impl, runs_kernels, traced


class FoldedConv(FusibleConv):
    """Convolution with bias, leaky ReLU, blur where there was one: a `ConvNormAct` in eval mode.

    Where no gradients are recorded, kernels add the bias in the pass that does everything else up
    to the next convolution.

    Attributes:
        impl: 'auto', 'triton' or 'reference', as in `tresnet.ops.abn.abn`.
    """

    def __init__(
        self, conv: nn.Conv2d, slope: float | None, aa: nn.Module, impl: Impl = "reference"
    ) -> None:
        """Keep the parts.

        Args:
            conv: holds the norm's scale in its weight and the norm's shift in its bias.
            slope: negative slope of the leaky ReLU; None for no activation.
            aa: what follows the activation: the blur, or an identity.
            impl: whose kernels run in eager mode.
        """
        super().__init__()
        self.conv = conv
        self.slope = slope
        self.aa = aa
        self.impl: Impl = impl
        self.eval()

    def _forward_plain(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.slope is not None:
            # in place, unless someone may keep the convolution's output
            y = F.leaky_relu(y, self.slope, torch.jit.is_scripting() or self._unwatched())
        return self.aa(y)

    @torch.jit.unused
    def _unwatched(self) -> bool:
        return not is_watched(self.conv)

    @property
    def fused_impl(self) -> Impl | None:
        """Whose kernels may follow the convolution; None where it is not as it was made."""
        if torch.is_grad_enabled() or forward_ad._current_level >= 0 or traced():
            return None
        conv = self.conv
        plain = type(conv) is nn.Conv2d and type(conv.bias) in (nn.Parameter, FakeTensor)
        return self.impl if plain and self._unwatched() else None

    def kernels_run(self, x: Tensor) -> bool:
        """Whether they run on what the convolution makes of `x`."""
        return x.dim() == 4 and runs_kernels(x, self.impl)

    def convolve(self, x: Tensor) -> Tensor:
        """The convolution without its bias, which the kernels add."""
        assert isinstance(self.conv, nn.Conv2d)
        return self.conv._conv_forward(x, self.conv.weight, None)

    def _run(
        self, x: Tensor, blur: bool, se: Any, shortcut: Tensor | None, keep_output: bool
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(self.conv, nn.Conv2d)
        assert self.conv.bias is not None
        y = shift(x, self.conv.bias, self.slope, blur, se, shortcut)
        return y, y

    def train(self, mode: bool = True) -> "FoldedConv":
        """Stay in eval mode.

        Raises:
            InputError: `mode` is True: there is no norm left to train.
        """
        if mode:
            raise InputError(
                "expected a model with its norms to train, got one folded for inference: train "
                "the model that was given to tresnet.surgery.fold, then fold it again"
            )
        return super().train(mode)

    def extra_repr(self) -> str:
        """Return the settings for `repr`."""
        return f"slope={self.slope}"
