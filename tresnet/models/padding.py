"""Channels padded with zeros to widths that hardware likes, and back.

L and XL have 76 and 83 channels and multiples of these; kernels for matrix units want multiples of
8. A padded channel is exactly zero everywhere, and so is every gradient of its parameters: its
convolution's weights, gamma and beta are zero, and no weight that reads it differs from zero.
Optimizers that do not heed a tensor's size, such as SGD and AdamW, train it as without padding.
"""

import copy
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tresnet.errors import InputError
from tresnet.layers.conv_norm_act import ConvNormAct
from tresnet.layers.folded_conv import FoldedConv
from tresnet.layers.norm import PLAIN_NORMS, InplaceABN, NormAct
from tresnet.layers.squeeze_excite import SqueezeExcite
from tresnet.layers.watched import check_model, refuse_watched
from tresnet.models.tresnet import TResNet

ModuleT = TypeVar("ModuleT", bound=nn.Module)

# The image is given, and the last map's width is what the head and the users of features see.
_GIVEN_INPUT = re.compile(r"body\.conv1|body\.layer4\.[1-9]\d*\.conv1")
_GIVEN_OUTPUT = re.compile(r"body\.layer4\.\d+\.(conv3|downsample\.\d+)")


def pad_channels(model: ModuleT, multiple: int = 8, *, inplace: bool = False) -> ModuleT:
    """Zero-pad the widths inside a TResNet to multiples of `multiple`; the same function.

    Outputs, intermediate features, gradients, training and checkpoints stay those of the unpadded
    model (to rounding: kernels sum in another order). Feature maps are returned without their
    padding, and the last map, in front of the head, is never padded. Make the optimizer afterwards,
    on the result's parameters.

    Args:
        model: a TResNet, or a module around one; unchanged unless `inplace`.
        multiple: what the widths are to be divisible by. A padded model is padded again from
            its original widths.
        inplace: change `model` itself.

    Returns:
        The padded model, in the same mode.

    Raises:
        InputError: `multiple` is no whole number of at least 1, or there is no TResNet, or it is
            compiled or folded.
    """
    check_multiple(multiple)
    model = _own_copy(model, inplace)
    for network in _networks(model):
        _crop(network)
        _pad(network, multiple)
    return model


def check_multiple(value: object) -> None:
    """Raise `InputError` unless it is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"expected pad as a whole number of at least 1, such as 8, got {value!r}")


def unpad_channels(model: ModuleT, *, inplace: bool = False) -> ModuleT:
    """Return the model that `pad_channels` was given, with the weights it has now.

    Args:
        model: a padded TResNet, or a module around one; unchanged unless `inplace`.
        inplace: change `model` itself.

    Raises:
        InputError: there is no TResNet, it is compiled or folded, or it is not padded.
    """
    model = _own_copy(model, inplace)
    networks = _networks(model)
    if not any(network.unpadded_shapes for network in networks):
        raise InputError("expected a model padded by pad_channels, got one without padding")
    for network in networks:
        _crop(network)
    return model


def _own_copy(model: ModuleT, inplace: bool) -> ModuleT:
    _networks(model)
    return model if inplace else copy.deepcopy(model)


def _networks(model: nn.Module) -> list[TResNet]:
    check_model(model)
    if any(isinstance(module, FoldedConv) for module in model.modules()):
        raise InputError("expected a model with its norms, got a folded one: pad before folding")
    networks = [module for module in model.modules() if isinstance(module, TResNet)]
    if not networks:
        raise InputError(f"expected a TResNet from tresnet.create, got {type(model).__name__}")
    return networks


def _pad(model: TResNet, multiple: int) -> None:
    def wide(channels: int) -> int:
        return -(-channels // multiple) * multiple

    before = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    wanted: list[tuple[nn.Conv2d, NormAct | None, int, int]] = []
    for name, module in model.body.named_modules(prefix="body"):
        if isinstance(module, ConvNormAct):
            conv = module.conv
            norm: Any = module.bn
            plain = type(conv) is nn.Conv2d and type(norm) in PLAIN_NORMS
            if not plain or norm.weight is None:
                raise InputError(
                    f"expected a convolution and a batch norm with weights in {name}, got "
                    f"{type(conv).__name__} and {type(norm).__name__}: pad before they are replaced"
                )
            inputs, outputs = conv.in_channels, conv.out_channels
            inputs = inputs if _GIVEN_INPUT.fullmatch(name) else wide(inputs)
            outputs = outputs if _GIVEN_OUTPUT.fullmatch(name) else wide(outputs)
            wanted.append((conv, norm, inputs, outputs))
        elif isinstance(module, SqueezeExcite):
            reduced, channels = wide(module.fc1.out_channels), wide(module.fc1.in_channels)
            given = module.fc2.out_channels
            gates = channels if given == module.fc1.in_channels else given  # one for all channels
            wanted += [(module.fc1, None, channels, reduced), (module.fc2, None, reduced, gates)]
    _resize(model, wanted)
    after = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    model.pad = multiple
    model.unpadded_shapes = {name: before[name] for name in before if before[name] != after[name]}


def _crop(model: TResNet) -> None:
    """Undo `_pad`."""
    refuse_live_padding(model)
    shapes = model.unpadded_shapes
    parts: dict[str, Any] = dict(model.body.named_modules(prefix="body"))
    wanted: list[tuple[nn.Conv2d, NormAct | None, int, int]] = []
    for name, module in parts.items():
        if isinstance(module, nn.Conv2d):
            outputs, inputs = shapes.get(f"{name}.weight", module.weight.shape)[:2]
            norm = parts.get(name.removesuffix("conv") + "bn")
            wanted.append((module, norm, inputs, outputs))
    _resize(model, wanted)
    model.pad, model.unpadded_shapes = 0, {}


def _resize(model: TResNet, wanted: Sequence[tuple[nn.Conv2d, NormAct | None, int, int]]) -> None:
    """Give convolutions, and the norms behind them, other numbers of inputs and outputs."""
    if all((c.in_channels, c.out_channels) == (i, o) for c, _, i, o in wanted):
        return
    refuse_watched(dict(model.body.named_modules(prefix="body")))
    for conv, norm, inputs, outputs in wanted:
        _resize_conv(conv, inputs, outputs)
        if norm is not None:
            _resize_norm(norm, outputs)


def _resize_conv(conv: nn.Conv2d, inputs: int, outputs: int) -> None:
    conv.in_channels, conv.out_channels = inputs, outputs
    conv.weight = _resized(conv.weight, (outputs, inputs, *conv.kernel_size))
    if conv.bias is not None:
        conv.bias = _resized(conv.bias, (outputs,))


def _resize_norm(norm: NormAct, channels: int) -> None:
    norm.num_features = channels
    for name in ("weight", "bias", "running_mean", "running_var"):
        if getattr(norm, name) is not None:  # as running statistics may be
            setattr(norm, name, _resized(getattr(norm, name), (channels,), _fill(norm, name)))


def _fill(module: nn.Module, name: str) -> float:
    """What a tensor is padded with."""
    if name == "weight" and isinstance(module, InplaceABN):
        return module.eps  # gamma 0 is beyond it, and indifferent where the input is zero
    return float(name == "running_var")


@torch.no_grad()
def renew_padding(model: TResNet) -> None:
    """Make the padding of a model again what `pad_channels` made it; the rest stays."""
    modules = dict(model.named_modules())
    for path, shape in model.unpadded_shapes.items():
        prefix, _, name = path.rpartition(".")
        module = modules.get(prefix)
        if module is None:  # a stage that was cut off
            continue
        tensor, real = getattr(module, name), tuple(map(slice, shape))
        kept = tensor[real].clone()
        tensor.fill_(_fill(module, name))[real] = kept


@torch.no_grad()
def refuse_live_padding(model: TResNet) -> None:
    """Check that padded channels are zero, so that the model without them computes the same.

    Raises:
        InputError: they are not; names the first convolution.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    for path in model.unpadded_shapes:
        prefix, _, name = path.removesuffix(".weight").rpartition(".")
        if name not in ("conv", "fc1") or prefix not in modules:  # fc2 gates what is zero
            continue
        layer = modules[prefix]
        first, *_ = model.unpadded_shapes[path]
        rows = getattr(layer, name).weight[first:].flatten(1).ne(0).any(1)
        norm = layer.fc1 if name == "fc1" else layer.bn
        gamma = norm.weight[first:] if name == "conv" else rows
        if not rows.is_meta and bool((rows & gamma.ne(0) | norm.bias[first:].ne(0)).any()):
            raise InputError(
                f"expected padded channels that are zero, got others behind {prefix}.{name}, which "
                "files and the model without padding leave out: initialise the model without "
                "padding, then pad it"
            )


@torch.no_grad()
def _resized(old: Tensor, shape: tuple[int, ...], fill: float = 0.0) -> Tensor:
    """`old` cropped to `shape` or padded by `fill`, in its memory format; itself if it fits."""
    if old.shape == shape:
        return old
    layout = torch.contiguous_format if old.is_contiguous() else torch.channels_last
    new = torch.full(shape, fill, dtype=old.dtype, device=old.device)
    new = new.contiguous(memory_format=layout) if len(shape) == 4 else new
    common = tuple(slice(min(a, b)) for a, b in zip(old.shape, shape, strict=True))
    new[common] = old[common]
    return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
