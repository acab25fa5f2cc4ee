"""Whether the layers of a block run fused: decided here alone, once for a call of a block."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import has_torch_function

from tresnet.layers.blur_pool import BlurPool2d
from tresnet.layers.global_pool import GlobalPool2d
from tresnet.layers.norm import NormAct
from tresnet.layers.squeeze_excite import SqueezeExcite
from tresnet.layers.watched import is_watched
from tresnet.ops import recompute
from tresnet.ops.autocast import autocast_dtype
from tresnet.ops.dispatch import Impl


class FusibleConv(nn.Module):
    """A convolution with what follows it: module by module, or in fused kernels."""

    __jit_unused_properties__ = ("fused_impl",)
    if TYPE_CHECKING:  # TorchScript would read these too, and knows no such types
        conv: nn.Conv2d
        aa: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """(N, in, H, W) to (N, out, H, W), or to half the height and width, rounded up."""
        if torch.jit.is_scripting():
            return self._forward_plain(x)
        return self._forward_eager(x)

    def _forward_plain(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    @torch.jit.unused
    def _forward_eager(self, x: Tensor) -> Tensor:
        if not runs_fused(x, [self]):
            return self._forward_plain(x)
        return self.normalise(self.convolve(x))[0]

    @property
    def fused_impl(self) -> Impl | None:
        """Whose kernels may follow the convolution; None where they never do."""
        raise NotImplementedError

    def kernels_run(self, x: Tensor) -> bool:
        """Whether they run on what the convolution makes of `x`; asked where they may."""
        raise NotImplementedError

    def convolve(self, x: Tensor) -> Tensor:
        """What `normalise` takes, of the layer's input."""
        return self.conv(x)

    def _run(
        self, x: Tensor, blur: bool, se: Any, shortcut: Tensor | None, keep_output: bool
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def normalise(
        self,
        x: Tensor,
        se: nn.Module | None = None,
        shortcut: Tensor | None = None,
        keep_output: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Run what follows the convolution, also in a block, in fused kernels.

        Only where `runs_fused` has said that they run.

        Args:
            x: (N, out, H, W), of `convolve`.
            se: applied after the blur.
            shortcut: what is added in front of a ReLU; None for neither.
            keep_output: False lets backward rebuild the output of the ReLU.

        Returns:
            The output, twice, as `tresnet.ops.abn.fused_abn` does.
        """
        blur = isinstance(self.aa, BlurPool2d)
        weights = se.weights() if isinstance(se, SqueezeExcite) else None
        fits = shortcut is None or (shortcut.dtype == x.dtype and shortcut.shape == x.shape)
        if shortcut is not None and (blur or not fits):
            y = torch.relu_(self._run(x, blur, weights, None, True)[0] + shortcut)
            return y, y
        return self._run(x, blur, weights, shortcut, keep_output)

    def normalise_into(
        self, layer: "FusibleConv", x: Tensor, se: nn.Module | None = None
    ) -> Tensor:
        """The convolution of `layer` on what `normalise` returns, which nothing else reads."""
        y = self.normalise(x, se)[0]
        del x  # only in inference nobody else holds it
        return layer.convolve(y)


def runs_fused(
    x: Any,
    layers: Sequence[nn.Module],
    se: nn.Module | None = None,
    drop_path: nn.Module | None = None,
) -> bool:
    """Whether `layers`, and what follows them in a block, run by fused kernels on `x`.

    They do where the kernels run, and would pass over no module that someone watches or has
    changed.

    Args:
        x: (N, C, H, W), the input of the block.
        layers: of the block; one that decides for itself alone is not asked about its own hooks.
        se: squeeze and excitation of the block.
        drop_path: in front of the block's join.
    """
    first = layers[0]
    if not (isinstance(x, Tensor) and isinstance(first, FusibleConv)):
        return False
    impl = first.fused_impl
    if impl is None or not first.kernels_run(x):
        return False
    if drop_path is not None and not _is_nothing(drop_path):
        return False
    for layer in layers:
        if not isinstance(layer, FusibleConv) or layer.fused_impl != impl:
            return False
        if len(layers) > 1 and not is_own(layer, FusibleConv):
            return False
        if not (is_own(layer.aa, BlurPool2d) or is_own(layer.aa, nn.Identity)):
            return False
    return se is None or is_own(se, nn.Identity) or _excites(se)


def runs_behind(norm: NormAct, conv: nn.Module, x: Tensor) -> bool:
    """Whether `conv`, which alone reads what a fused `norm` makes of `x`, is a part of its node.

    It is where backward is to rebuild what `conv` reads, which costs no pass of its own there.

    Args:
        norm: which `runs_fused` has looked at.
        conv: what follows.
        x: the input of `norm`.
    """
    return (
        not torch.compiler.is_compiling()
        and recompute.active()
        and type(conv) is nn.Conv2d
        and not is_watched(conv)
        and conv.bias is None
        and conv.padding_mode == "zeros"
        and isinstance(conv.padding, tuple)
        and not has_torch_function((conv.weight,))
        and x.dtype == (autocast_dtype(x.device.type) or conv.weight.dtype)
        and (x.requires_grad or norm.weight.requires_grad or norm.bias.requires_grad)
    )


def is_own(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module computes what its kind does, and no one watches."""
    return (
        isinstance(module, kind) and type(module).forward is kind.forward and not is_watched(module)
    )


def _is_nothing(drop_path: nn.Module) -> bool:
    return not is_watched(drop_path) and (
        type(drop_path) is nn.Identity
        or (not drop_path.training and type(drop_path).__module__ == "timm.layers.drop")
    )


def _excites(se: nn.Module) -> bool:
    return (
        isinstance(se, SqueezeExcite)
        and is_own(se, SqueezeExcite)
        and is_own(se.pool, GlobalPool2d)
        and se.pool.pool_type in ("avg", "fast")
        and _is_linear(se.fc1)
        and _is_linear(se.fc2)
        and se.fc2.out_channels == se.fc1.in_channels
    )


def _is_linear(fc: nn.Module) -> bool:
    return (
        type(fc) is nn.Conv2d
        and not is_watched(fc)
        and fc.kernel_size == (1, 1)
        and fc.padding == (0, 0)
        and fc.groups == 1
        and fc.bias is not None
    )
