"""Choice between plain modules and the fused program of `stage`, for parts of a model.

Each call of a model reads the part's modules, parameters, buffers, hooks and flags once, into a
`Part`. If the fused program cannot run it, `_Plain` tells the reason, and plain modules run.
"""

import warnings
from collections.abc import Callable, Container, Iterable, Mapping
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _autograd
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.nn.modules import module as every_module

from tresnet.errors import InputError
from tresnet.fused import padding, stage
from tresnet.fused.stage import Block, Conv, Layer, Part
from tresnet.layers.blur_pool import BlurPool2d
from tresnet.layers.conv_norm_act import ConvNormAct
from tresnet.layers.folded_conv import FoldedConv
from tresnet.layers.global_pool import GlobalPool2d
from tresnet.layers.norm import ABN, BatchNormAct, InplaceABN, running_stats_frozen
from tresnet.layers.parallel_bottleneck import ParallelBottleneck
from tresnet.layers.space_to_depth import SpaceToDepth
from tresnet.layers.squeeze_excite import SqueezeExcite
from tresnet.ops.abn import Norm, SEWeights
from tresnet.ops.autocast import autocast_dtype
from tresnet.ops.dispatch import Impl, runs_kernels, traced
from tresnet.ops.unit_floats import unit_floats

BlockT = TypeVar("BlockT", bound=type[nn.Module])

# Values of `How.recompute`. Each recomputes more in backward than the one before, and keeps less.
RECOMPUTE = ("none", "activations", "outputs")

_residual: dict[type, tuple[tuple[str, ...], Any]] = {
    ParallelBottleneck: (("conv1", "conv2", "conv3"), ParallelBottleneck.forward)
}
# Each class's `forward` at import, to detect a `forward` that is replaced later.
_FORWARD: dict[type[nn.Module], Any] = {
    kind: kind.forward
    for kind in (
        *(nn.Sequential, nn.Identity, nn.AvgPool2d, nn.Conv2d, ABN, BlurPool2d, ConvNormAct),
        *(FoldedConv, GlobalPool2d, SpaceToDepth, SqueezeExcite),
    )
}
# Exact types of tensors that the program reads; subclasses may define other operators.
_TENSORS = {Tensor, nn.Parameter, FakeTensor}


class How(NamedTuple):
    """Settings with which a model runs its parts.

    If `impl` is 'triton', Triton kernels run the fused program. If it is 'reference', plain
    operators run the program. If it is 'auto' on a GPU, kernels run the program if they passed
    their check; otherwise operators run it. If it is 'auto' on a CPU, plain modules run, unless
    norms share batch statistics between processes. `recompute` is one of `RECOMPUTE`.
    """

    impl: Impl = "auto"
    recompute: str = "activations"


class _Plain(Exception):  # noqa: N818 it never leaves this file
    """Raised if a part must run as plain modules; the message says why."""


class _OtherNorm(_Plain):
    """Raised for `BatchNormAct` and `InplaceABN`; it is caught, and plain modules run silently."""


def residual_block(*layers: str) -> Callable[[BlockT], BlockT]:
    """Register a class of blocks, with the names of its consecutive layers, for the fused program.

    The blocks also have modules `drop_path` and `downsample` (the shortcut). `se`, an optional
    module, runs after the second layer.
    """

    def register(kind: BlockT) -> BlockT:
        _residual[kind] = layers, kind.forward
        return kind

    return register


def run(
    parts: Mapping[str, nn.Module], x: Tensor, how: How, blocks: SpaceToDepth | None = None
) -> Tensor:
    """Run parts of a model one after another, by the fused program where it applies.

    If the program applies to all parts, these form one node of the autograd graph. Otherwise each
    part runs separately, by the program or as a module. A part is a `ConvNormAct`, a residual
    block, or an `nn.Sequential` of these. `x` is (N, C, H, W), or uint8 images if space-to-depth
    (`blocks`) is given. Raises `InputError` if `how.impl` is 'triton' and kernels cannot run.
    """
    return run_row({0: parts}, x, how, blocks, (0,))[0]


def run_row(
    row: Mapping[int, Mapping[str, nn.Module]],
    x: Tensor,
    how: How,
    blocks: SpaceToDepth | None,
    wanted: Container[int],
) -> dict[int, Tensor]:
    """Run the groups of parts in `row` in order; return the outputs of groups with `wanted` keys.

    Between groups, maps may have padded channels. Returned maps are not padded.
    """
    outputs, channels = {}, None
    for key, parts in row.items():
        x, channels = _run(parts, x, channels, how, blocks)
        blocks = None
        if key in wanted:
            outputs[key] = _cropped(x, channels)
    return outputs


def _run(
    parts: Mapping[str, nn.Module],
    x: Tensor,
    channels: int | None,
    how: How,
    blocks: SpaceToDepth | None,
) -> tuple[Tensor, int | None]:
    """Return the output, and its number of channels without padding, or None if not padded."""
    wanted = _wanted(parts.values(), x, how.impl)
    try:
        if wanted:
            part = _read_parts(parts.values(), x, channels, how, blocks)
            if not part.pads:
                return stage.run(part, _cropped(x, channels)), None
            return stage.run(part, x), len(part.blocks[-1].layers[-1].conv.weight)
    except _Plain as reason:
        if len(parts) == 1 and not isinstance(reason, _OtherNorm):
            # with "auto" `_refuse` only warns: other ranks may wait for the statistics of this rank
            impl = "auto" if _shares_statistics(parts.values()) else how.impl
            _refuse(next(iter(parts)), reason, impl)

    def each(x: Tensor, channels: int | None, blocks: SpaceToDepth | None) -> tuple[Any, Any]:
        for name, part in parts.items():
            if wanted and len(parts) > 1:
                x, channels = _run({name: part}, x, channels, how, blocks)
            else:
                x, channels = _call(part, _cropped(x, channels), blocks), None
            blocks = None
        return x, channels

    if not (wanted and torch.is_grad_enabled() and _shares_statistics(parts.values())):
        return each(x, channels, blocks)
    parameters = [p for part in parts.values() for p in part.parameters()]
    y = _OneNode.apply(lambda x: _cropped(*each(x, channels, blocks)), x, *parameters)
    return cast(Tensor, y), None


class _OneNode(torch.autograd.Function):
    """Plain modules as one node of the autograd graph, for norms that share batch statistics.

    Other ranks may run these modules by the fused program, which returns all gradients at its end.
    This node does the same, so that all-reduces and collectives have one order on all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.inputs = x.detach().requires_grad_(x.requires_grad), *parameters
        with torch.enable_grad():
            ctx.output = run(ctx.inputs[0])
        return ctx.output.detach()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        wanted = {id(t): t for t in ctx.inputs if t.requires_grad}
        # the inner graph is kept if the caller's backward keeps the outer graph
        retained = _autograd._get_current_graph_task_keep_graph()
        grads = torch.autograd.grad(
            ctx.output, [*wanted.values()], grad, retain_graph=retained, allow_unused=True
        )
        found = dict(zip(wanted, grads, strict=True))
        return None, *(found.pop(id(t), None) for t in ctx.inputs)


def _cropped(x: Tensor, channels: int | None) -> Tensor:
    return x if channels is None else padding.crop_map(x, channels)


def _refuse(name: str, reason: _Plain, impl: Impl) -> None:
    if impl == "triton":
        raise InputError(f"impl='triton' cannot run {name}: {reason}; use 'auto'") from None
    warnings.warn(f"{name} runs as plain modules: {reason}", stacklevel=4)


def _wanted(parts: Iterable[nn.Module], x: Any, impl: Impl) -> bool:
    """Return whether `impl` selects the program, and tracers, transforms and `type(x)` allow it."""
    # a level of 0 or more means forward-mode derivatives, which the program lacks
    if type(x) not in _TENSORS or traced() or forward_ad._current_level >= 0:
        return False
    if impl != "auto" or x.is_cuda:
        return True
    return _shares_statistics(parts)


def _shares_statistics(parts: Iterable[nn.Module]) -> bool:
    return dist.is_initialized() and any(
        isinstance(m, ABN) and m.group() is not None for part in parts for m in part.modules()
    )


def _call(part: nn.Module, x: Tensor, blocks: SpaceToDepth | None) -> Tensor:
    if blocks is None:
        return part(x)
    return part(blocks(unit_floats(x, dtype=next(part.parameters()).dtype)))


def _dtype(x: Tensor, own: torch.dtype) -> torch.dtype:
    """Return the dtype in which a convolution with weights of the dtype `own` computes."""
    return own if own == torch.float64 else autocast_dtype(x.device.type) or own


def _read_parts(
    parts: Iterable[nn.Module],
    x: Tensor,
    channels: int | None,
    how: How,
    blocks: SpaceToDepth | None,
) -> Part:
    if any(_EVERY_MODULES):
        raise _Plain("hooks of every module")
    reader, read = _Reader(), list[Block]()
    if blocks is not None:
        reader.own(blocks, SpaceToDepth)
    for part in parts:
        row = type(part) is nn.Sequential
        modules = reader.own(part, nn.Sequential)["_modules"].values() if row else [part]
        read += [reader.block(module) for module in modules]
    if not read:
        raise _Plain("it is empty")
    reader.check(x.device)
    if len({*map(id, reader.counters)}) < len(reader.counters):
        raise _Plain("a norm that runs twice")
    trains = torch.is_grad_enabled() and (x.requires_grad or any(b.trains() for b in read))
    if reader.folded and trains:
        raise _Plain("folded norms have no gradients in the program")
    dtype = _dtype(x, reader.weights[0].dtype)
    mixed = x.dtype not in (dtype, torch.uint8) or any(w.dtype != dtype for w in reader.weights)
    if mixed and not autocast_dtype(x.device.type):
        raise _Plain(f"maps in {x.dtype}, not all weights of which are {dtype}")
    kernels = runs_kernels(x.device, dtype, how.impl, isinstance(x, FakeTensor))
    pads = _pads(read, reader.weights, x, channels)
    if pads:
        expected = reader.weights[0].shape[1]
        _check_channels(read, expected if blocks is not None else channels or x.shape[1])
    return Part(
        tuple(read), dtype, kernels, pads, how.recompute,
        None if blocks is None else blocks.block_size, reader.counters,
    )  # fmt: skip


def _pads(blocks: list[Block], weights: list[Tensor], x: Tensor, channels: int | None) -> bool:
    """Return whether blocks may pad, and either `x` or weights are padded or padding saves time."""
    stored = blocks[0].layers[0].norm.gamma is None and padding.is_stored(weights[0])
    return (
        (channels is not None or stored or x.numel() >= padding.FROM)
        and (channels is not None or any(len(weight) % padding.MULTIPLE for weight in weights))
        and all(map(padding.may_pad, blocks))
    )


# PyTorch calls the hooks in these dictionaries for every module, and never replaces a dictionary.
_EVERY_MODULES = (
    every_module._global_forward_pre_hooks,
    every_module._global_forward_hooks,
    every_module._global_backward_pre_hooks,
    every_module._global_backward_hooks,
)
_hooks = itemgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
_device = attrgetter("device")


class _Reader:
    """Reads the blocks of a part, and collects modules and tensors for `check`.

    `check` loops over all modules and tensors, which is faster than a call for each module.
    """

    def __init__(self) -> None:
        self.folded, self.frozen = False, running_stats_frozen()
        self.modules: list[nn.Module] = []
        self.counters: list[Tensor] = []  # num_batches_tracked of norms that update statistics
        self.weights: list[Tensor] = []  # weights of convolutions, without those of SEs
        self.tensors: list[tuple[str, Any, int]] = []  # name, tensor, expected number of values

    def own(self, module: nn.Module, kind: type[nn.Module]) -> dict[str, Any]:
        if type(module) is not kind:
            raise _Plain(f"expected {kind.__name__}, got {type(module).__name__}")
        self.modules.append(module)
        return module.__dict__

    def check(self, device: torch.device) -> None:
        """Raise `_Plain` for hooks, changed forwards, or tensors of wrong class, device or size."""
        for kind in {*map(type, self.modules)}:
            if kind.forward is not _FORWARD.get(kind, kind.forward):
                raise _Plain(f"another forward of the class {kind.__name__}")
        hooked = [*map(any, map(_hooks, map(vars, self.modules)))]
        if any(hooked):
            raise _Plain(f"a hook of {type(self.modules[hooked.index(True)]).__name__}")
        for module in self.modules:
            own = module.__dict__
            if "forward" in own or "_conv_forward" in own or own.get("_compiled_call_impl"):
                name = type(module).__name__
                raise _Plain(f"a forward or a compiled call put in the place of {name}'s")
        _, tensors, lengths = zip(*self.tensors, strict=True)
        if (
            {*map(type, tensors)} <= _TENSORS
            and {*map(_device, tensors)} == {device}
            and (*map(Tensor.numel, tensors),) == lengths
        ):
            return  # the loop below takes twice as long, but says which tensor does not fit
        for name, tensor, length in self.tensors:
            if type(tensor) not in _TENSORS:
                raise _Plain(f"{name} is {type(tensor).__name__}")
            if tensor.device != device or tensor.numel() != length:
                shape = tuple(tensor.shape)
                raise _Plain(f"{name} {shape} on {tensor.device} does not fit")

    def block(self, module: nn.Module) -> Block:
        if type(module) in (ConvNormAct, FoldedConv):
            return Block((self.layer(module),))
        names, forward = _residual.get(type(module), ((), None))
        if type(module).forward is not forward:
            raise _Plain(f"expected a block, got {type(module).__name__}")
        own = self.own(module, type(module))
        parts = own["_modules"]
        se = parts.get("se")
        first, second, *rest = names
        layers = (
            self.layer(parts[first]),
            self.layer(parts[second], se),
            *[self.layer(parts[name]) for name in rest],
        )
        if type(module) is ParallelBottleneck:
            block = Block(layers, True, copies=own["groups"] if own["shared_input"] else 1)
        else:
            shortcut, halves = self.shortcut(parts["downsample"])
            drop, scale = self.drop_path(parts["drop_path"])
            block = Block(layers, True, shortcut, halves, drop, scale)
        _check_shapes(block)
        return block

    def shortcut(self, module: nn.Module) -> tuple[Layer | None, bool]:
        if type(module) is nn.Identity:
            self.modules.append(module)
            return None, False
        parts = list(self.own(module, nn.Sequential)["_modules"].values())
        halves = len(parts) == 2
        if not parts or len(parts) > 2:
            raise _Plain("another shortcut")
        if halves:
            pool = self.own(parts[0], nn.AvgPool2d)
            form = pool["kernel_size"], pool["stride"], pool["padding"], pool["ceil_mode"]
            if form != (2, 2, 0, True) or pool["count_include_pad"] or pool["divisor_override"]:
                raise _Plain("another pool in the shortcut")
        return self.layer(parts[-1]), halves

    def layer(self, module: nn.Module, se: nn.Module | None = None) -> Layer:
        folded = type(module) is FoldedConv
        own = self.own(module, FoldedConv if folded else ConvNormAct)
        parts = own["_modules"]
        blur = type(parts["aa"]) is BlurPool2d
        self.own(parts["aa"], BlurPool2d if blur else nn.Identity)
        conv, bias = self.conv(parts["conv"])
        channels = conv.weight.shape[0]
        excitation = None if se is None else self.excitation(se, channels)
        if folded:
            self.folded = True
            self.tensors.append(("bias", bias, channels))
            return Layer(conv, Norm(None, bias, slope=own["slope"], blur=blur, se=excitation))
        if bias is not None:
            raise _Plain("a convolution with a bias in front of a norm")
        return Layer(conv, self.norm(parts["bn"], channels, blur, excitation))

    def conv(self, module: nn.Module) -> tuple[Conv, Any]:
        own = self.own(module, nn.Conv2d)
        tensors, padding = own["_parameters"], own["padding"]
        if own["padding_mode"] != "zeros" or own["dilation"] != (1, 1) or type(padding) is str:
            raise _Plain("a convolution that is dilated, or does not pad with zeros")
        weight = self.weight(tensors)
        self.weights.append(weight)
        return Conv(weight, own["stride"], padding, own["groups"]), tensors["bias"]

    def weight(self, parameters: dict[str, Any]) -> Tensor:
        weight: Any = parameters.get("weight")
        if type(weight) not in _TENSORS:
            raise _Plain(f"weight is {type(weight).__name__}")
        self.tensors.append(("weight", weight, weight.numel()))
        return weight

    def norm(self, module: nn.Module, channels: int, blur: bool, se: SEWeights | None) -> Norm:
        if type(module) in (BatchNormAct, InplaceABN):
            raise _OtherNorm
        own = self.own(module, ABN)
        values, buffers = own["_parameters"], own["_buffers"]
        gamma, beta = values.get("weight"), values.get("bias")
        mean, var = buffers.get("running_mean"), buffers.get("running_var")
        training, momentum = own["training"], own["momentum"]
        updates = training and own["track_running_stats"] and not self.frozen
        if updates:
            if momentum is None:
                raise _Plain("a norm with momentum=None, the mean of all batches")
            counter = buffers.get("num_batches_tracked")
            self.counters.append(counter)
            self.tensors.append(("num_batches_tracked", counter, 1))
        self.tensors += (
            ("weight", gamma, channels),
            ("bias", beta, channels),
            ("running_mean", mean, channels),
            ("running_var", var, channels),
        )
        group = cast(ABN, module).group() if training and own["synchronised"] else None
        return Norm(
            gamma, beta, mean, var, training, momentum if updates else None, own["eps"],
            own["slope"], blur, se, group,
        )  # fmt: skip

    def excitation(self, module: nn.Module, channels: int) -> SEWeights | None:
        if type(module) is nn.Identity:
            self.modules.append(module)
            return None
        parts = self.own(module, SqueezeExcite)["_modules"]
        if self.own(parts["pool"], GlobalPool2d)["pool_type"] not in ("avg", "fast"):
            raise _Plain("a squeeze by another pool")
        layers = []
        for name in ("fc1", "fc2"):
            own = self.own(parts[name], nn.Conv2d)
            weight, bias = self.weight(own["_parameters"]), own["_parameters"].get("bias")
            if own["padding"] != (0, 0) or own["groups"] != 1 or weight.shape[2:] != (1, 1):
                raise _Plain("an excitation by other convolutions than 1x1")
            self.tensors.append(("bias", bias, weight.shape[0]))
            layers += weight, bias
        if layers[0].shape[1] != channels or layers[2].shape[:2] != layers[0].shape[1::-1]:
            raise _Plain("an excitation of another width")
        return SEWeights(*layers)

    def drop_path(self, module: nn.Module) -> tuple[float, bool]:
        """Return the probability that a sample is dropped, and whether kept samples are scaled."""
        kind = type(module)
        if kind is nn.Identity:
            self.modules.append(module)
            return 0.0, False
        if kind.__module__ != "timm.layers.drop" or kind.__name__ != "DropPath":
            raise _Plain(f"expected DropPath, got {kind.__name__}")
        own = self.own(module, kind)
        return own["drop_prob"] if own["training"] else 0.0, own["scale_by_keep"]


def _check_channels(blocks: list[Block], given: int) -> None:
    """Raise `_Plain` if a layer gets a wrong number of channels, which padding would hide."""
    for block in blocks:
        widths = [given, *(len(layer.conv.weight) for layer in block.layers)]
        given = widths.pop()
        if block.shortcut is not None:
            widths.append(widths[0])
        for found, (conv, _) in zip(widths, block.all_layers(), strict=True):
            if found != conv.weight.shape[1]:
                raise _Plain(f"expected {conv.weight.shape[1]} channels, got {found}")


def _check_shapes(block: Block) -> None:
    """Raise `_Plain` unless the shortcut has the shape of the map to which it is added."""
    for conv, _ in block.all_layers():
        (above, beside), (_, _, height, width) = conv.padding, conv.weight.shape
        if conv.stride != (1, 1) or height != 2 * above + 1 or width != 2 * beside + 1:
            raise _Plain("a convolution in a block that changes height or width")
    first, last = block.layers[0].conv, block.layers[-1].conv
    channels = first.weight.shape[1] * first.groups * block.copies
    blurs = [layer.norm.blur for layer in block.layers]
    beside = False
    if block.shortcut is not None:
        channels, beside = len(block.shortcut.conv.weight), block.shortcut.norm.blur
    if len(last.weight) != channels or sum(blurs) != block.halves or blurs[-1] or beside:
        raise _Plain("a shortcut of another shape than what it joins")
