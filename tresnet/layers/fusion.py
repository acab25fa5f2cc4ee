"""Whether the layers of a block run fused: decided here alone, once for a call of a block."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import has_torch_function

from tresnet.layers.blur_pool import BlurPool2d
from tresnet.layers.global_pool import GlobalPool2d
from tresnet.layers.norm import ABN, NormAct
from tresnet.layers.squeeze_excite import SqueezeExcite
from tresnet.layers.watched import is_watched
from tresnet.ops import recompute
from tresnet.ops.autocast import autocast_dtype

if TYPE_CHECKING:
    from tresnet.layers.conv_norm_act import ConvNormAct


def runs_fused(
    x: Any,
    layers: Sequence["ConvNormAct"],
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
    from tresnet.layers.conv_norm_act import ConvNormAct  # which imports this

    norm = getattr(layers[0], "bn", None)  # none where surgery has folded it
    if not isinstance(norm, ABN) or not isinstance(x, Tensor) or not norm.kernels_run(x):
        return False
    if drop_path is not None and not _is_nothing(drop_path):
        return False
    for layer in layers:
        if len(layers) > 1 and not _is_own(layer, ConvNormAct):
            return False
        if not _is_own(layer.bn, ABN) or layer.bn.impl != norm.impl:
            return False
        if not (_is_own(layer.aa, BlurPool2d) or _is_own(layer.aa, nn.Identity)):
            return False
    return se is None or _is_own(se, nn.Identity) or _excites(se)


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


def _is_own(module: nn.Module, kind: type[nn.Module]) -> bool:
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
        and _is_own(se, SqueezeExcite)
        and _is_own(se.pool, GlobalPool2d)
        and se.pool.pool_type in ("avg", "fast")
        and all(type(fc) is nn.Conv2d and not is_watched(fc) for fc in (se.fc1, se.fc2))
    )
