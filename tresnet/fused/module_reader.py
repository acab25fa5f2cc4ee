"""Reads a model's modules into blocks for the fused kernels, and refuses unsupported modules.

The fused kernels run only modules of `models.blocks` and `layers`. For other classes, changed
forwards and hooks, `read` raises `Unsupported` with the reason, and plain PyTorch modules run.
`read` also refuses unknown children, parameters and tensors, so that no operation is left out.
Each call of a model reads the modules again.
"""

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as every_module

from tresnet.fused.block_specs import Block, Conv, DropPath, EvalNorm, FusedBlocks, Layer
from tresnet.layers.blur_pool import BlurPool2d
from tresnet.layers.conv_norm_act import ConvNormAct
from tresnet.layers.folded_conv import FoldedConv
from tresnet.layers.global_pool import GlobalPool2d
from tresnet.layers.norm import ABN, InplaceABN, NormAct
from tresnet.layers.squeeze_excite import SqueezeExcite
from tresnet.models.blocks import BasicBlock, Bottleneck
from tresnet.ops.autocast import autocast_dtype, maps_dtype
from tresnet.ops.epilogue import Epilogue, SEWeights

# Classes of norms that the fused kernels never run.
UNFUSED_NORMS = NormAct, InplaceABN, nn.SyncBatchNorm
# Exact types of tensors that the fused kernels read; subclasses may define other operators.
TENSORS = {Tensor, nn.Parameter, FakeTensor}
# Children and parameters of each class; a module with others is refused: no kernel reads them.
_KNOWN: dict[type[nn.Module], tuple[str, ...]] = {
    BasicBlock: ("downsample", "conv1", "conv2", "se", "drop_path"),
    Bottleneck: ("downsample", "conv1", "conv2", "se", "conv3", "drop_path"),
    ConvNormAct: ("conv", "bn", "aa"),
    FoldedConv: ("conv", "aa"),
    SqueezeExcite: ("pool", "fc1", "fc2"),
    nn.Conv2d: ("weight", "bias"),
    ABN: ("weight", "bias"),
    **dict.fromkeys((nn.Identity, nn.AvgPool2d, BlurPool2d, GlobalPool2d), ()),
}


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


# Global hooks of PyTorch. The dictionaries are never replaced, so these references stay valid.
_EVERY_MODULES = (
    every_module._global_forward_pre_hooks,
    every_module._global_forward_hooks,
    every_module._global_backward_pre_hooks,
    every_module._global_backward_hooks,
)
_hooks = itemgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)


def check_modules(modules: Sequence[nn.Module]) -> None:
    """Raise `Unsupported` if a module has hooks or a forward of its own; global hooks count too."""
    if any(_EVERY_MODULES):
        raise Unsupported("global module hooks")
    for module in modules:
        own = module.__dict__
        if any(_hooks(own)):
            raise Unsupported(f"a hook of {type(module).__name__}")
        if "forward" in own or "_conv_forward" in own or own.get("_compiled_call_impl"):
            name = type(module).__name__
            raise Unsupported(f"a replaced forward or a compiled call of {name}")


class _Reader:
    """Reads blocks, and collects their modules and tensors to check all of them together."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.tensors: list[Any] = []
        self.vectors: list[tuple[Any, str, int]] = []  # tensor, name, expected number of values
        self.weights: list[int] = []
        self.batch_norms: list[ABN] = []
        self.eval_norms: list[EvalNorm] = []
        self.folded = False
        self.channels: int = 0  # of the last block's output, or 0

    def attributes(self, module: nn.Module, kind: type[nn.Module]) -> dict[str, Any]:
        """Return a module's attributes; raise `Unsupported` for an unexpected class or child."""
        if type(module) is not kind:
            raise Unsupported(f"expected {kind.__name__}, got {type(module).__name__}")
        self.modules.append(module)
        own = module.__dict__
        parts = *own["_modules"], *own["_parameters"]
        if parts != _KNOWN[kind]:
            expected = ", ".join(_KNOWN[kind]) or "no parts"
            raise Unsupported(f"{kind.__name__} with {expected} expected, got {', '.join(parts)}")
        return own

    def add(self, tensor: Any) -> int:
        """Append a tensor, possibly again, and return its index; autograd sums both gradients."""
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def add_vector(self, tensor: Any, name: str, size: int) -> int:
        """Append a tensor that must be dense and have `size` values, and return its index."""
        self.vectors.append((tensor, name, size))
        return self.add(tensor)

    def check_tensors(self, device: torch.device) -> None:
        """Raise `Unsupported` for a tensor with a wrong type, device, size or layout."""
        for tensor, name, size in self.vectors:
            if type(tensor) not in TENSORS:
                raise Unsupported(f"{name} is {type(tensor).__name__}")
            if tensor.device != device or tensor.numel() != size or not tensor.is_contiguous():
                got = f"{name} {tuple(tensor.shape)} with strides {tensor.stride()}"
                raise Unsupported(f"{size} dense values expected, got {got} on {tensor.device}")
        devices = {self.tensors[index].device for index in self.weights}
        if devices != {device}:
            raise Unsupported(f"weights on {devices}, expected {device}")

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
        if type(module) is nn.Identity:
            self.attributes(module, nn.Identity)
            return [], False
        if type(module) is not nn.Sequential or len(module) not in (1, 2):
            raise Unsupported("a shortcut of another kind")
        self.modules.append(module)
        *pools, layer = module._modules.values()
        for pool in pools:
            own = self.attributes(pool, nn.AvgPool2d)
            form = own["kernel_size"], own["stride"], own["padding"], own["ceil_mode"]
            if form != (2, 2, 0, True) or own["count_include_pad"] or own["divisor_override"]:
                raise Unsupported("a shortcut whose pool is not a 2x2 average with stride 2")
        return [self.layer(layer)], len(pools) == 1

    def layer(self, module: nn.Module, se: nn.Module | None = None) -> Layer:
        folded = type(module) is FoldedConv
        own = self.attributes(module, FoldedConv if folded else ConvNormAct)
        parts = own["_modules"]
        blur = type(parts["aa"]) is BlurPool2d
        self.attributes(parts["aa"], BlurPool2d if blur else nn.Identity)
        conv, bias, channels = self.conv(parts["conv"])
        if not folded:
            if bias is not None:
                raise Unsupported("a convolution with a bias in front of a norm")
            return Layer(conv, self.norm(parts["bn"], channels, blur, se))
        self.folded = True
        beta = self.add_vector(bias, "bias", channels)
        excitation = self.excitation(se, channels)
        epilogue = Epilogue(None, beta, se=excitation, eps=0.0, slope=own["slope"], blur=blur)
        return Layer(conv, epilogue)

    def conv(self, module: nn.Module) -> tuple[Conv, Any, int]:
        own = self.attributes(module, nn.Conv2d)
        padding, weight = own["padding"], own["_parameters"]["weight"]
        plain = own["padding_mode"] == "zeros" and own["dilation"] == (1, 1) and own["groups"] == 1
        if not plain or type(padding) is str:
            raise Unsupported("a convolution with dilation, groups or padding other than zeros")
        index = self.weight(weight)
        self.weights.append(index)
        return Conv(index, own["stride"], padding), own["_parameters"]["bias"], weight.shape[0]

    def weight(self, weight: Any) -> int:
        if type(weight) not in TENSORS:
            raise Unsupported(f"weight is {type(weight).__name__}")
        return self.add(weight)

    def norm(self, module: nn.Module, channels: int, blur: bool, se: nn.Module | None) -> Epilogue:
        if type(module) in UNFUSED_NORMS:
            raise UnfusedNorm(f"a norm of the class {type(module).__name__}")
        own = self.attributes(module, ABN)
        values, buffers = own["_parameters"], own["_buffers"]
        gamma = self.add_vector(values["weight"], "weight", channels)
        beta = self.add_vector(values["bias"], "bias", channels)
        for name in ("running_mean", "running_var"):
            self.vectors.append((buffers[name], name, channels))
        stats, training = None, own["training"]
        if own["eps"] < 1e-30:
            raise Unsupported("a norm with eps=0: its padded channels would not be finite")
        if training and own["momentum"] is None and own["track_running_stats"]:
            raise Unsupported("a norm with momentum=None, the mean of all batches")
        if training:
            self.batch_norms.append(module)  # pyright: ignore[reportArgumentType]
        else:
            stats = len(self.tensors)
            self.tensors.append(None)
            self.eval_norms.append(EvalNorm(stats, gamma, module))  # pyright: ignore[reportArgumentType]
        excitation = self.excitation(se, channels)
        eps, slope = own["eps"], own["slope"]
        return Epilogue(gamma, beta, stats, se=excitation, eps=eps, slope=slope, blur=blur)

    def excitation(self, module: nn.Module | None, channels: int) -> SEWeights | None:
        if module is None or type(module) is nn.Identity:
            if module is not None:
                self.attributes(module, nn.Identity)
            return None
        parts = self.attributes(module, SqueezeExcite)["_modules"]
        if self.attributes(parts["pool"], GlobalPool2d)["pool_type"] not in ("avg", "fast"):
            raise Unsupported("an SE whose pool is not the average")
        indices, shapes = list[int](), list[torch.Size]()
        for name in ("fc1", "fc2"):
            own = self.attributes(parts[name], nn.Conv2d)
            weight, bias = own["_parameters"]["weight"], own["_parameters"]["bias"]
            indices += [self.weight(weight), self.add_vector(bias, "bias", weight.shape[0])]
            self.vectors.append((weight, "weight", weight.numel()))
            shapes.append(weight.shape)
            if own["padding"] != (0, 0) or own["groups"] != 1 or weight.shape[2:] != (1, 1):
                raise Unsupported("an SE with other convolutions than 1x1")
        if shapes[0][1] != channels or shapes[1][:2] != shapes[0][1::-1]:
            raise Unsupported("an SE whose channels do not fit")
        return SEWeights(*indices)

    def drop_path(self, module: nn.Module) -> DropPath | None:
        kind = type(module)
        if kind is nn.Identity:
            self.attributes(module, nn.Identity)
            return None
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
        before = of_block = self.channels or self.tensors[block.layers[0].conv.weight].shape[1]
        of_shortcut, blurs = of_block, 0
        for index, (conv, epilogue) in enumerate(block.layers):
            channels, expected, *size = self.tensors[conv.weight].shape
            if expected != before:
                raise Unsupported(f"expected {expected} channels, got {before}")
            same = [2 * conv.padding[0] + 1, 2 * conv.padding[1] + 1]
            if block.residual and (size != same or conv.stride != (1, 1)):
                raise Unsupported("a convolution in a block that changes height or width")
            if block.shortcut and index == 0:
                of_shortcut = channels
            else:
                before = channels
            blurs += epilogue.blur
        if block.residual:
            outside = block.layers[-1].epilogue.blur or (
                block.shortcut and block.layers[0].epilogue.blur
            )
            if blurs != block.pools or outside or of_shortcut != before:
                raise Unsupported("a shortcut of another shape than the residual branch")
        self.channels = before
        return block
