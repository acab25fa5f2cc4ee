"""Fold batch norms into the preceding convolutions, for inference."""

import copy
import itertools
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from tresnet.errors import InputError
from tresnet.layers.conv_norm_act import ConvNormAct
from tresnet.layers.folded_conv import FoldedConv
from tresnet.layers.hooks import check_model, refuse_hooked, replace_modules
from tresnet.layers.norm import PLAIN_NORMS, NormAct
from tresnet.layers.space_to_depth import SpaceToDepth
from tresnet.models.tresnet import TResNet
from tresnet.surgery.composing import convolution

ModuleT = TypeVar("ModuleT", bound=nn.Module)
# timm's `freeze` replaces norms by this class. Comparing names avoids importing torchvision.
_FROZEN = ("torchvision.ops.misc", "FrozenBatchNorm2d")


def fold(model: ModuleT, *, merge_stem: bool = False, inplace: bool = False) -> ModuleT:
    """Return a model for inference, with norms folded into convolutions and with the same outputs.

    y = gamma (conv(x) - mean) / sqrt(var + eps) + beta becomes one convolution with bias, whose
    weights are computed in float64 and rounded once. `fold` handles TResNets, also inside another
    module. In any `nn.Sequential`, `fold` also handles a `Conv2d` before a `BatchNorm2d`, a norm of
    this package or a norm frozen by timm. The model must call this `nn.Sequential` as a whole. If a
    model calls the children one by one and computes something in between, the result is wrong,
    without an error. The result can be exported, but not trained or saved by `save_checkpoint`.
    Before folding, load the weights, and set the model's device, dtype and memory format.

    `merge_stem` replaces space-to-depth and the stem's 3x3 convolution by one equal convolution
    (12x12 with stride 4, if the block size is 4). `inplace` changes `model` itself.

    Raises:
        InputError: `model` is in training mode, is compiled, has nothing to fold, or has a norm
            without running statistics; or a convolution, norm or `ConvNormAct` has hooks or a
            parametrization, or is of an unknown class; or folded weights exceed the range of their
            dtype. In all these cases `model` is unchanged.
    """
    _check(model, merge_stem)
    folded = copy.deepcopy(model)
    networks = [module for module in folded.modules() if isinstance(module, TResNet)]
    new: dict[nn.Module, nn.Module] = {
        m: FoldedConv(fold_norm(m.conv, m.bn), getattr(m.bn, "slope", m.slope), m.aa)
        for m in folded.modules()
        if isinstance(m, ConvNormAct)
    }
    replace_modules(folded, new)
    for parent in list(folded.modules()):
        if isinstance(parent, nn.Sequential):
            _fold_pairs(parent)
    for network in networks if merge_stem else ():
        _merge_stem(network)
    folded.requires_grad_(False).eval()
    if not inplace:
        return folded
    model.__dict__.update(folded.__dict__)
    return model


def _conv_norm_pairs(parent: nn.Sequential) -> list[tuple[str, str]]:
    if type(parent).forward is not nn.Sequential.forward or "forward" in vars(parent):
        return []  # a changed forward may call the children in another order
    return [
        (name, next_name)
        for (name, conv), (next_name, norm) in itertools.pairwise(parent._modules.items())
        if (type(conv) is nn.Conv2d or is_parametrized(conv)) and _is_foldable(norm)
    ]


def _is_foldable(norm: nn.Module) -> bool:
    kind = type(norm)
    return kind in PLAIN_NORMS or (kind.__module__, kind.__name__) == _FROZEN


def _check(model: nn.Module, merge_stem: bool) -> None:
    check_model(model)
    replaced: dict[str, nn.Module] = {}
    norms: dict[str, nn.Module] = {}
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        pairs = _conv_norm_pairs(module) if isinstance(module, nn.Sequential) else []
        if isinstance(module, ConvNormAct) and prefix:
            _check_parts(module, prefix)
            pairs = [("conv", "bn")]
        if pairs or (isinstance(module, SpaceToDepth) and merge_stem):
            replaced |= {} if isinstance(module, nn.Sequential) else {prefix: module}
        for pair in pairs:
            replaced |= {dot + name: module.get_submodule(name) for name in pair}
            norms[dot + pair[1]] = module.get_submodule(pair[1])
    if not norms:
        again = any(isinstance(module, FoldedConv) for module in model.modules())
        raise InputError(
            "expected a TResNet of this package, or a Conv2d before a norm in an nn.Sequential of "
            f"{type(model).__name__}, found none" + (": it is folded already" if again else "")
        )
    refuse_hooked(replaced)
    for name, norm in norms.items():
        if norm.training and type(norm) in PLAIN_NORMS:
            raise InputError(
                f"expected a model in eval mode, but {name} is in training mode, where a norm "
                "depends on the batch: call model.eval() first"
            )
        if norm.running_mean is None:
            raise InputError(
                f"expected norms with running statistics, but {name} has none: its output depends "
                "on the batch and cannot be folded"
            )


def _check_parts(block: ConvNormAct, name: str) -> None:
    conv, norm = block.conv, block.bn
    if type(block) is not ConvNormAct:
        raise InputError(f"expected ConvNormAct, but {name} is {type(block).__name__}")
    refuse_hooked({f"{name}.conv": conv})
    if type(conv) is not nn.Conv2d:
        raise InputError(
            f"expected plain convolutions, but {name}.conv is {type(conv).__name__}: call "
            "tresnet.surgery.compose first"
        )
    if not _is_foldable(norm):
        raise InputError(
            f"expected batch norms, but {name}.bn is {type(norm).__name__}: fold before it is "
            "replaced"
        )


def _fold_pairs(parent: nn.Sequential) -> None:
    for name, next_name in _conv_norm_pairs(parent):
        conv, norm = parent.get_submodule(name), parent.get_submodule(next_name)
        assert isinstance(conv, nn.Conv2d)
        folded = fold_norm(conv, norm)
        if isinstance(norm, NormAct):
            folded = FoldedConv(folded, norm.slope, nn.Identity())
        parent.register_module(name, folded)
        parent.register_module(next_name, nn.Identity())


@torch.no_grad()
def fold_norm(conv: nn.Conv2d, norm: Any) -> nn.Conv2d:
    """Return one convolution for `conv` and `norm` in eval mode, without the norm's activation."""
    mean, var = norm.running_mean, norm.running_var
    gamma = norm._gamma() if isinstance(norm, NormAct) else norm.weight
    scale = torch.rsqrt(var.double() + norm.eps) * (1.0 if gamma is None else gamma.double())
    bias = (0.0 if conv.bias is None else conv.bias.double()) - mean.double()
    bias = bias * scale + (0.0 if norm.bias is None else norm.bias.double())
    weight = conv.weight.double() * scale[:, None, None, None]
    return convolution(weight, bias, conv.weight, **_settings(conv)).eval()


def _settings(conv: nn.Conv2d) -> dict[str, Any]:
    names = "stride", "padding", "dilation", "groups", "padding_mode"
    return {name: getattr(conv, name) for name in names}


@torch.no_grad()
def _merge_stem(model: TResNet) -> None:
    """Replace space-to-depth and the stem's convolution by one convolution that reads the image."""
    blocks, stem = model.body.get_submodule("s2d"), model.body.get_submodule("conv1")
    if not (isinstance(blocks, SpaceToDepth) and isinstance(stem, FoldedConv)):
        raise InputError("merge_stem expected the stem of a TResNet, got one that was replaced")
    side, conv = blocks.block_size, stem.conv
    out_channels, _, height, width = conv.weight.shape
    # space-to-depth orders channels by (row in the block, column in the block, image channel)
    weight = conv.weight.reshape(out_channels, side, side, -1, height, width)
    weight = weight.permute(0, 3, 4, 1, 5, 2).reshape(out_channels, -1, height * side, width * side)
    settings = _settings(conv) | {"stride": side, "padding": side * (height // 2)}
    stem.conv = convolution(weight, conv.bias, conv.weight, **settings).eval()
    model.body.register_module("s2d", nn.Identity())
