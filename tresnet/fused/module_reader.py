"""Reads a model's modules into blocks for the fused kernels, and refuses unsupported modules.

The fused kernels run only modules of `models.blocks` and `layers`. For other classes, changed
forwards and hooks, `read` raises `Unsupported` with the reason, and plain PyTorch modules run.
`read` also refuses unknown children, parameters and tensors, so that no operation is left out.
Each call of a model reads the modules again.
"""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as torch_module

from tresnet.fused.block_specs import Block, Conv, DropPath, EvalNorm, FusedBlocks, Layer
from tresnet.layers.blur_pool import BlurPool2d
from tresnet.layers.conv_norm_act import ConvNormAct
from tresnet.layers.folded_conv import FoldedConv
from tresnet.layers.global_pool import GlobalPool2d
from tresnet.layers.hooks import find_hooks
from tresnet.layers.norm import ABN, InplaceABN, NormAct
from tresnet.layers.squeeze_excite import SqueezeExcite
from tresnet.models.blocks import BasicBlock, Bottleneck
from tresnet.ops.autocast import autocast_dtype, maps_dtype
from tresnet.ops.epilogue import Epilogue, SEWeights

# Classes of norms that the fused kernels never run.
UNFUSED_NORMS = NormAct, InplaceABN, nn.SyncBatchNorm
# Exact types of tensors that the fused kernels read; subclasses may define other operators.
TENSORS = {Tensor, nn.Parameter, FakeTensor}
# Children and parameters of each class, and attributes whose values kernels take for granted.
_KNOWN: dict[type[nn.Module], tuple[tuple[str, ...], dict[str, Any]]] = {
    BasicBlock: (("downsample", "conv1", "conv2", "se", "drop_path"), {}),
    Bottleneck: (("downsample", "conv1", "conv2", "se", "conv3", "drop_path"), {}),
    ConvNormAct: (("conv", "bn", "aa"), {}),
    FoldedConv: (("conv", "aa"), {}),
    SqueezeExcite: (("pool", "fc1", "fc2"), {}),
    nn.Conv2d: (("weight", "bias"), {"groups": 1, "dilation": (1, 1), "padding_mode": "zeros"}),
    ABN: (("weight", "bias"), {}),
    nn.AvgPool2d: ((), {"kernel_size": 2, "stride": 2, "padding": 0, "ceil_mode": True,
                        "count_include_pad": False, "divisor_override": None}),
    GlobalPool2d: ((), {"pool_type": "avg"}),
    BlurPool2d: ((), {}),
    nn.Identity: ((), {}),
}  # fmt: skip


class Unsupported(Exception):  # noqa: N818 it never leaves `tresnet.fused`
    """Error for modules that the fused kernels cannot run; the message says why."""


class UnfusedNorm(Unsupported):
    """Error for norm classes that are never fused; users chose them, so no warning is given."""


def read(modules: Iterable[nn.Module], x: Tensor) -> FusedBlocks:
    """Return `FusedBlocks` of modules that run one after another on `x`, or raise `Unsupported`.

    A module is a `ConvNormAct`, `FoldedConv` or residual block, or an `nn.Sequential` of these.
    """
    reader = _Reader()
    blocks = list[Block]()
    for module in modules:
        if type(module) is nn.Sequential:
            reader.modules.append(module)
            blocks += map(reader.block, module._modules.values())
        else:
            blocks.append(reader.block(module))
    if not blocks:
        raise Unsupported("it is empty")
    check_modules(reader.modules)
    reader.check_tensors(x.device)
    norms = [*reader.batch_norms, *(norm.module for norm in reader.eval_norms)]
    if len({*map(id, norms)}) < len(norms):
        raise Unsupported("a norm that runs twice")
    weights = [reader.tensors[index] for index in reader.weights]
    dtype = maps_dtype(x, weights[0])
    dtypes = {*(weight.dtype for weight in weights), dtype if x.dtype == torch.uint8 else x.dtype}
    if dtypes != {dtype} and not autocast_dtype(x.device.type):
        raise Unsupported(f"maps in {x.dtype}, but not all weights are {dtype}")
    return FusedBlocks(
        blocks, reader.tensors, reader.weights, reader.batch_norms, reader.eval_norms,
        weights[0].shape[1], reader.channels, dtype, reader.folded,
    )  # fmt: skip


def check_modules(modules: Sequence[nn.Module]) -> None:
    """Raise `Unsupported` if a module has hooks or a forward of its own; global hooks count too."""
    if torch_module._has_any_global_hook():
        raise Unsupported("global module hooks")
    if (hooked := find_hooks(modules)) is not None:
        raise Unsupported(hooked)


class _Reader:
    """Reads blocks, and collects their modules and tensors."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.tensors: list[Any] = []
        self.checks: list[tuple[Any, str, tuple[int, ...]]] = []  # tensor, name, expected shape
        self.weights: list[int] = []
        self.batch_norms: list[ABN] = []
        self.eval_norms: list[EvalNorm] = []
        self.folded = False
        self.channels: int = 0  # of the last block's output, or 0

    def attributes(self, module: nn.Module, kind: type[nn.Module]) -> dict[str, Any]:
        """Return a module's attributes; raise `Unsupported` unless it is as its class builds it."""
        if type(module) is not kind:
            raise Unsupported(f"expected {kind.__name__}, got {type(module).__name__}")
        self.modules.append(module)
        own = module.__dict__
        parts, settings = _KNOWN[kind]
        if (*own["_modules"], *own["_parameters"]) != parts:
            got = ", ".join((*own["_modules"], *own["_parameters"]))
            raise Unsupported(f"{kind.__name__} with {parts} expected, got {got}")
        if settings and not settings.items() <= own.items():
            raise Unsupported(f"expected {kind.__name__} with {settings}")
        return own

    def is_identity(self, module: nn.Module) -> bool:
        if type(module) is not nn.Identity:
            return False
        self.attributes(module, nn.Identity)
        return True

    def add(self, tensor: Any, name: str, *shape: int) -> int:
        """Append a tensor, possibly again, and return its index; autograd sums both gradients.

        If a shape is given, `check_tensors` refuses tensors of other shapes or with gaps.
        """
        self.checks.append((tensor, name, shape))
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def check_tensors(self, device: torch.device) -> None:
        """Raise `Unsupported` for a tensor with a wrong type, device, shape or layout."""
        for tensor, name, shape in self.checks:
            if type(tensor) not in TENSORS:
                raise Unsupported(f"{name} is {type(tensor).__name__}")
            fits = not shape or (tensor.shape == shape and tensor.is_contiguous())
            if tensor.device != device or not fits:
                got = f"{name} {tuple(tensor.shape)} with strides {tensor.stride()}"
                expected = f"expected {shape or 'a tensor'} on {device}"
                raise Unsupported(f"{got} on {tensor.device}, {expected}")

    def block(self, module: nn.Module) -> Block:
        kind: Any = type(module)
        if kind in (ConvNormAct, FoldedConv):
            return self.checked(Block((self.layer(module),)))
        if kind not in (BasicBlock, Bottleneck):
            raise Unsupported(f"expected a block, got {kind.__name__}")
        parts = self.attributes(module, kind)["_modules"]
        shortcut, pools = self.shortcut(parts["downsample"])
        layers = [*shortcut, self.layer(parts["conv1"]), self.layer(parts["conv2"], parts["se"])]
        if kind is Bottleneck:
            layers.append(self.layer(parts["conv3"]))
        drop_path = self.drop_path(parts["drop_path"])
        return self.checked(Block(tuple(layers), True, len(shortcut) > 0, pools, drop_path))

    def shortcut(self, module: nn.Module) -> tuple[list[Layer], bool]:
        """Return the shortcut's layer, if there is one, and whether a pool precedes it."""
        if self.is_identity(module):
            return [], False
        if type(module) is not nn.Sequential or len(module) not in (1, 2):
            raise Unsupported("a shortcut of another kind")
        self.modules.append(module)
        *pools, layer = module._modules.values()
        for pool in pools:
            self.attributes(pool, nn.AvgPool2d)
        return [self.layer(layer)], len(pools) == 1

    def layer(self, module: nn.Module, se: nn.Module | None = None) -> Layer:
        folded = type(module) is FoldedConv
        own = self.attributes(module, FoldedConv if folded else ConvNormAct)
        parts = own["_modules"]
        blur = type(parts["aa"]) is BlurPool2d
        self.attributes(parts["aa"], BlurPool2d if blur else nn.Identity)
        conv, bias, channels = self.conv(parts["conv"])
        if folded:
            self.folded = True
            norm = None, self.add(bias, "bias", channels), None, 0.0, own["slope"]
        elif bias is None:
            norm = self.norm(parts["bn"], channels)
        else:
            raise Unsupported("a convolution with a bias in front of a norm")
        gamma, beta, stats, eps, slope = norm
        return Layer(
            conv, Epilogue(gamma, beta, stats, self.excitation(se, channels), eps, slope, blur)
        )

    def conv(self, module: nn.Module) -> tuple[Conv, Any, int]:
        """Return a convolution without its bias, the bias and the number of output channels."""
        own = self.attributes(module, nn.Conv2d)
        weight, bias = own["_parameters"]["weight"], own["_parameters"]["bias"]
        if type(own["padding"]) is str:
            raise Unsupported(f"a convolution with padding={own['padding']!r}")
        index = self.add(weight, "weight")
        self.weights.append(index)
        return Conv(index, own["stride"], own["padding"]), bias, weight.shape[0]

    def norm(self, module: nn.Module, channels: int) -> tuple[int, int, int | None, float, Any]:
        """Return indices of gamma, beta and statistics in eval mode, eps and slope of a norm."""
        if type(module) in UNFUSED_NORMS:
            raise UnfusedNorm(f"a norm of the class {type(module).__name__}")
        own = self.attributes(module, ABN)
        values, buffers, norm = own["_parameters"], own["_buffers"], cast(ABN, module)
        gamma = self.add(values["weight"], "weight", channels)
        beta = self.add(values["bias"], "bias", channels)
        for name in ("running_mean", "running_var"):
            self.checks.append((buffers[name], name, (channels,)))
        if own["eps"] < 1e-30:
            raise Unsupported("a norm with eps=0: its padded channels would not be finite")
        stats = None
        if not own["training"]:
            stats = len(self.tensors)
            self.tensors.append(None)
            self.eval_norms.append(EvalNorm(stats, gamma, norm))
        elif own["momentum"] is None and own["track_running_stats"]:
            raise Unsupported("a norm with momentum=None, the mean of all batches")
        else:
            self.batch_norms.append(norm)
        return gamma, beta, stats, own["eps"], own["slope"]

    def excitation(self, module: nn.Module | None, channels: int) -> SEWeights | None:
        if module is None or self.is_identity(module):
            return None
        parts = self.attributes(module, SqueezeExcite)["_modules"]
        self.attributes(parts["pool"], GlobalPool2d)
        fc1 = self.attributes(parts["fc1"], nn.Conv2d)
        fc2 = self.attributes(parts["fc2"], nn.Conv2d)
        if not fc1["padding"] == fc2["padding"] == (0, 0):
            raise Unsupported("an SE with padded convolutions")
        weight1, bias1 = fc1["_parameters"].values()
        weight2, bias2 = fc2["_parameters"].values()
        reduced = weight1.shape[0]
        return SEWeights(
            self.add(weight1, "weight", reduced, channels, 1, 1),
            self.add(bias1, "bias", reduced),
            self.add(weight2, "weight", channels, reduced, 1, 1),
            self.add(bias2, "bias", channels),
        )

    def drop_path(self, module: nn.Module) -> DropPath | None:
        if self.is_identity(module):
            return None
        kind = type(module)
        if kind.__module__ != "timm.layers.drop" or kind.__name__ != "DropPath":
            raise Unsupported(f"expected DropPath, got {kind.__name__}")
        self.modules.append(module)
        own = module.__dict__
        if not (own["training"] and own["drop_prob"]):
            return None
        return DropPath(own["drop_prob"], own["scale_by_keep"])

    def checked(self, block: Block) -> Block:
        """Return the block; raise `Unsupported` if its channels or sizes do not fit together.

        Unchecked, a wrong number of channels would be padded, and no later operation would fail.
        """
        source = self.channels or self.tensors[block.layers[0].conv.weight].shape[1]
        on_shortcut = self.width(block.layers[: block.shortcut], source, block.residual)
        self.channels = self.width(block.layers[block.shortcut :], source, block.residual)
        blurs = [layer.epilogue.blur for layer in block.layers]
        inner = sum(blurs[block.shortcut : -1])
        fits = on_shortcut == self.channels and sum(blurs) == inner == block.pools
        if block.residual and not fits:
            raise Unsupported("a shortcut of another shape than the residual branch")
        return block

    def width(self, layers: Sequence[Layer], channels: int, residual: bool) -> int:
        """Return the number of channels behind layers; raise `Unsupported` if two do not fit."""
        for conv, _ in layers:
            of_output, expected, *size = self.tensors[conv.weight].shape
            if expected != channels:
                raise Unsupported(f"expected {expected} channels, got {channels}")
            same = [2 * conv.padding[0] + 1, 2 * conv.padding[1] + 1]
            if residual and (size != same or conv.stride != (1, 1)):
                raise Unsupported("a convolution in a block that changes height or width")
            channels = of_output
        return channels
