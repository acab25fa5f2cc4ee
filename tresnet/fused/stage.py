"""Consecutive blocks as one node of the autograd graph, with explicit forward and backward.

A block has consecutive convolutions, each followed by operations of `tresnet.ops.abn`. A shortcut
may be added at the end. By default, forward saves its input, and the outputs of convolutions and of
blocks with a shortcut. Backward recomputes other maps. The gradient of a convolution's weight needs
the convolution's input, which is the output of the norm before it. The first pass of that norm's
backward recomputes this output.

All maps and parameters go through `save_for_backward`, so that version checks, saved-tensor hooks
and a second backward are PyTorch's own. Backward calls `maybe_clear_saved_tensors`, and frees each
map after its last use.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _autograd

from tresnet.errors import InputError
from tresnet.fused.padding import Padding, crop_gradient, pad_map
from tresnet.ops import abn, tiles
from tresnet.ops.abn import Kept, Norm, reference
from tresnet.ops.autocast import autocast_off
from tresnet.ops.space_to_depth import stem_input

_convolution_backward = torch.ops.aten.convolution_backward.default


class Conv(NamedTuple):
    """A convolution without bias or dilation, with zero padding."""

    weight: Tensor
    stride: tuple[int, int]
    padding: tuple[int, int]
    groups: int

    def forward(self, x: Tensor) -> Tensor:
        """Convolve `x` in the dtype of `x`."""
        weight = _in_dtype(self.weight, x.dtype)
        return torch.conv2d(x, weight, None, self.stride, self.padding, 1, self.groups)

    def backward(
        self, grad: Tensor, x: Tensor, of_x: bool, of_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return gradients of `x` and the weight; only the weight's gradient reads `x`'s values."""
        if of_x or self.weight.dtype == grad.dtype:
            weight = _in_dtype(self.weight, grad.dtype)
        else:  # the weight's gradient reads only the weight's shape
            weight = torch.empty_like(self.weight, dtype=grad.dtype)
        grad_x, grad_weight, _ = _convolution_backward(
            grad, x, weight, None, self.stride, self.padding, (1, 1), False, (0, 0), self.groups,
            (of_x, of_weight, False),
        )  # fmt: skip
        del weight
        return grad_x, None if grad_weight is None else _in_dtype(grad_weight, self.weight.dtype)


def _in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)  # a `to` without effect takes 10 times as long


class Layer(NamedTuple):
    """A convolution and the operations up to the next convolution."""

    conv: Conv
    norm: Norm

    def parameters(self) -> tuple[Tensor, ...]:
        """Return the weight, then the parameters of the norm and of the SE."""
        conv, norm = self
        gammas = () if norm.gamma is None else (norm.gamma,)
        return conv.weight, *gammas, norm.beta, *(norm.se or ())


class Block(NamedTuple):
    """Consecutive layers, and the shortcut that is added to the last layer's output.

    If `joins`, the shortcut is added, and a ReLU is applied. If `shortcut` is None, the block's
    input is added, repeated `copies` times along channels. If `halves`, 2x2 pixels are averaged
    before the layer `shortcut`. Stochastic depth (arXiv 1603.09382) drops the layers' output for a
    sample with probability `drop`. If `scale`, a kept output is divided by 1 - `drop`.
    """

    layers: tuple[Layer, ...]
    joins: bool = False
    shortcut: Layer | None = None
    halves: bool = False
    drop: float = 0.0
    scale: bool = True
    copies: int = 1

    def all_layers(self) -> tuple[Layer, ...]:
        """Return the consecutive layers, then the shortcut's layer if there is one."""
        return self.layers if self.shortcut is None else (*self.layers, self.shortcut)

    def with_layers(self, layers: list[Layer]) -> "Block":
        """Return the block with new layers, in the order of `all_layers`."""
        count = len(self.layers)
        return self._replace(
            layers=tuple(layers[:count]), shortcut=layers[count] if self.shortcut else None
        )

    def parameters(self) -> list[Tensor]:
        """Return the parameters of all layers."""
        return [p for layer in self.all_layers() for p in layer.parameters()]

    def trains(self) -> bool:
        """Return whether any parameter requires a gradient."""
        return any(p.requires_grad for p in self.parameters())


class Part(NamedTuple):
    """Consecutive blocks, and the settings of a call.

    Feature maps have `dtype`. If `pads`, the output is padded; the input may be padded already.
    `block_size` is for space-to-depth of uint8 images. `counters` has each `num_batches_tracked`.
    """

    blocks: tuple[Block, ...]
    dtype: torch.dtype
    kernels: bool
    pads: bool
    recompute: str
    block_size: int | None
    counters: list[Tensor]


def run(part: Part, x: Tensor) -> Tensor:
    """Return the output of the last block: (N, C, H, W) in the part's dtype."""
    if x.dtype != torch.uint8:
        x = tiles.dense(x.to(part.dtype))
    blocks, recorded, padding = list(part.blocks), torch.is_grad_enabled(), None
    with autocast_off(x.device.type):
        if part.pads:
            x = pad_map(x) if blocks[0].joins else x
            with torch.no_grad():
                padding = Padding(_layers(blocks), part.dtype, running=True)
        # frozen blocks at the front run outside the node, and keep nothing for backward
        while blocks and not (recorded and (x.requires_grad or blocks[0].trains())):
            x = _forward_block(part, padding, blocks.pop(0), x).out
        if blocks:
            parameters = [p for block in blocks for p in block.parameters()]
            part = part._replace(blocks=tuple(blocks))
            x = cast(Tensor, _Blocks.apply(part, padding, x, *parameters))
    if padding is not None:
        padding.write_back()
    if part.counters:
        torch._foreach_add_(part.counters, 1)
    return x


def _layers(blocks: Iterable[Block]) -> list[Layer]:
    return [layer for block in blocks for layer in block.all_layers()]


class _Run(NamedTuple):
    """Results of a block's forward; each tuple has one item for each layer of `block.layers`.

    `lives` says whether the layer's output requires a gradient. `kept` has the tensors that
    backward reads, or None if it reads none. `inputs` has the input of the layer's convolution, or
    None if it is not kept. The first input, that of the block, is always kept. `of_shortcut` has
    the tensors that backward reads for the shortcut's layer, or None if it reads none.
    """

    out: Tensor
    lives: tuple[bool, ...]
    kept: tuple[Kept | None, ...]
    inputs: tuple[Tensor | None, ...]
    of_shortcut: Kept | None


class _Record(NamedTuple):
    """A block, `_Run.lives`, and indices of saved tensors; `numbers` are indices of weights."""

    block: Block
    numbers: tuple[int, ...]
    lives: tuple[bool, ...]
    kept: tuple[Any, ...]
    inputs: Any
    of_shortcut: Any


def _forward_block(
    part: Part, padding: Padding | None, block: Block, x: Tensor, live: bool | None = None
) -> _Run:
    """Run a block; `live` is whether `x` requires a gradient, or None if no backward follows."""
    keeps = live is not None
    source = _maps(part, x)
    wide = block if padding is None else padding.block(block, source)
    shortcut, of_shortcut = source, None
    if block.shortcut is not None and wide.shortcut is not None:
        z = wide.shortcut.conv.forward(_halve(source) if block.halves else source)
        shortcut, needed = _follow(part, wide.shortcut.norm, z, keeps=keeps)
        wanted = live or _trains(block.shortcut)
        # `needed` also serves to recompute outputs, and for second derivatives by plain operators
        wanted = wanted or part.recompute == "outputs" or not part.kernels
        of_shortcut = needed if keeps and wanted else None
        del z, needed
    if block.copies > 1:
        shortcut = shortcut.repeat(1, block.copies, 1, 1)
    passed = _passed(block, source) if block.drop else None
    y, live = source, bool(live)
    lives, kept, inputs = list[bool](), list[Kept | None](), list[Tensor | None]()
    del source
    for layer, (conv, norm) in zip(block.layers, wide.layers, strict=True):
        joins = block.joins and layer is block.layers[-1]
        reads = layer.conv.weight.requires_grad and (not live or part.recompute == "none")
        inputs.append(y if keeps and reads else None)
        live = live or _trains(layer)
        lives.append(live)
        z = conv.forward(y)
        del y  # frees memory before the norm allocates
        y, needed = (
            _follow(part, norm, z, shortcut, passed, keeps)
            if joins
            else _follow(part, norm, z, keeps=keeps)
        )
        # plain operators have second derivatives, which read `needed` of all layers
        kept.append(needed if keeps and (live or joins or not part.kernels) else None)
        del z, needed
    inputs[0] = x
    return _Run(y, tuple(lives), tuple(kept), tuple(inputs), of_shortcut)


def _follow(
    part: Part,
    norm: Norm,
    y: Tensor,
    shortcut: Tensor | None = None,
    passed: Tensor | None = None,
    keeps: bool = False,
) -> tuple[Tensor, Kept]:
    y = tiles.dense(y)
    shortcut = None if shortcut is None else tiles.dense(shortcut, y)
    return abn.forward(y, norm, kernels=part.kernels, shortcut=shortcut, passed=passed, keeps=keeps)


def _passed(block: Block, x: Tensor) -> Tensor:
    """Return stochastic depth's factor (N, 1) of each sample, drawn as in timm's `DropPath`."""
    keep_prob = 1 - block.drop
    factors = x.new_empty(len(x), 1).bernoulli_(keep_prob)
    factors = factors if x.dtype == torch.float64 else factors.float()
    return factors / keep_prob if block.scale and keep_prob > 0 else factors


def _trains(layer: Layer) -> bool:
    return any(p.requires_grad for p in layer.parameters())


def _maps(part: Part, x: Tensor) -> Tensor:
    """Return the input of the first convolution; uint8 images become maps."""
    if x.dtype != torch.uint8:
        return x
    assert part.block_size is not None
    return stem_input(x, part.block_size, part.dtype, kernels=part.kernels)


def _halve(x: Tensor) -> Tensor:  # a window that crosses the border averages its pixels inside `x`
    return F.avg_pool2d(x, 2, 2, ceil_mode=True, count_include_pad=False)


def _dropped(part: Part) -> set[int]:
    """Return the indices of blocks whose output is recomputed, not kept as the next block's input.

    If `part.recompute` is "activations", these are the blocks without a shortcut. If it is
    "outputs", every second block with a shortcut is added: the output of such a block is recomputed
    from its input, so the block before must be kept. The last block is never included.
    """
    if part.recompute == "none":
        return set()
    row, last = part.blocks, len(part.blocks) - 1
    dropped = {index for index in range(last) if not row[index].joins}
    if part.recompute == "outputs":
        dropped |= {i for i in range(last - 1, -1, -2) if i - 1 not in dropped}
    return dropped


class _Blocks(torch.autograd.Function):
    """Autograd function of consecutive blocks; backward returns all gradients at its end."""

    @staticmethod
    def forward(
        ctx: Any, part: Part, padding: Padding | None, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        saved: list[Tensor | None] = list(parameters)
        records, dropped, first, live = [], _dropped(part), 0, x.requires_grad

        def save(tensors: Sequence[Tensor | None] | None) -> int | None:
            if tensors is None:
                return None
            saved.extend(tensors)
            return len(saved) - len(tensors)

        for index, block in enumerate(part.blocks):
            x, lives, kept, inputs, of_shortcut = _forward_block(part, padding, block, x, live)
            if index - 1 in dropped:
                inputs = None, *inputs[1:]
            numbers = list[int]()
            for layer in block.all_layers():
                numbers.append(first)
                first += len(layer.parameters())
            places = tuple(map(save, kept)), save(inputs), save(of_shortcut)
            records.append(_Record(block, tuple(numbers), lives, *places))
            live = True
        ctx.save_for_backward(*saved)
        ctx.part, ctx.records, ctx.count = part._replace(blocks=(), counters=[]), records, first
        return x

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Any, ...]:
        saved = list(ctx.saved_tensors)
        live = ctx.needs_input_grad[2]
        with autocast_off(grad.device.type):
            if torch.is_grad_enabled():
                return None, None, *_differentiable(ctx, saved, grad)
            ctx.maybe_clear_saved_tensors()  # a no-op if the graph is retained
            walk = _Backward(ctx.part, ctx.records, saved, ctx.count)
            grads: list[Tensor | None] = [grad, None]
            del grad, saved
            for index in reversed(range(len(ctx.records))):
                grads = walk.block(index, grads, live or index > 0)
            first, second = grads
        if not _autograd._get_current_graph_task_keep_graph():
            ctx.records = ()  # frees the weights that blocks hold; saved tensors are freed already
        if first is None or second is None:
            return None, None, second if first is None else first, *walk.found
        return None, None, first.add_(second), *walk.found


class _Backward:
    """Backward of consecutive blocks, which frees saved tensors after their last use."""

    def __init__(
        self, part: Part, records: list[_Record], saved: list[Any], parameters: int
    ) -> None:
        self.part, self.records, self.saved = part, records, saved
        self.found: list[Tensor | None] = [None] * parameters
        self.grad: Tensor | None = None  # gradient of the current convolution's output
        self.padding: Padding | None = None
        if part.pads:
            layers = _layers(record.block for record in records)
            self.padding = Padding(layers, part.dtype, running=False)

    def block(self, index: int, grads: list[Tensor | None], live: bool) -> list[Tensor | None]:
        """Return two gradients of the block's input: through the first layer and the shortcut.

        Without `live`, both are None. The output's gradients, in `grads`, are freed after use.
        """
        record = self.records[index]
        x = _maps(self.part, self.input(index))
        block = record.block if self.padding is None else self.padding.block(record.block, x)
        layers = block.layers
        first, at = None, len(layers) - 1
        masked = self.last_layer(record, layers[-1].norm, grads)
        if self.grad is not None:
            while at and record.lives[at - 1]:
                self.through_convolution(record, layers, at)
                at -= 1
            given = x if at == 0 else self.take(record.inputs + at)
            of_x = at == 0 and live
            first = self.convolution(layers[at].conv, record.numbers[at], given, of_x=of_x)
            del given
        if masked is not None and record.block.copies > 1:
            masked = masked.unflatten(1, (record.block.copies, -1)).sum(1)
        if masked is None or block.shortcut is None:
            return [first, masked if live else None]
        return [first, self.shortcut(record, block.shortcut, masked, x, first, live)]

    def last_layer(self, record: _Record, norm: Norm, grads: list[Tensor | None]) -> Tensor | None:
        """Run backward of the last norm; return the gradient of an added shortcut, or None."""
        kept = self.take_all(record.kept[-1])
        first, second = (
            g if g is None else tiles.dense(_in_dtype(g, kept.y.dtype), kept.y) for g in grads
        )
        grads.clear()
        assert first is not None
        if second is not None and not record.block.joins:
            first, second = first.add_(second), None
        sums = self.sums(first, second, norm, kept)
        masked, second = sums.written if record.block.joins else None, None
        first = first if masked is None else masked
        if record.lives[-1]:
            self.note(record.numbers[len(record.lives) - 1], sums)
            self.grad = abn.gradient(first, norm, kept, sums, kernels=self.part.kernels)
        return masked

    def through_convolution(self, record: _Record, layers: tuple[Layer, ...], at: int) -> None:
        """Run backward of a convolution, and of the norm before the convolution.

        If the convolution's input was not kept, it is recomputed: by `abn.rebuild` if `norm.blur`,
        otherwise by `abn.gradient_sums`, and then only if the weight requires a gradient.
        """
        conv, number = layers[at].conv, record.numbers[at]
        norm, kept = layers[at - 1].norm, self.take_all(record.kept[at - 1])
        given, trains = self.take(record.inputs + at), self.saved[number].requires_grad
        if given is None and norm.blur:
            given = abn.rebuild(norm, kept, kernels=self.part.kernels)
        if given is None and trains:
            grad = self.convolution(conv, number, kept.y, of_x=True, last=False)
            sums = self.sums(grad := tiles.dense(grad, kept.y), None, norm, kept, rebuilds=True)
            self.convolution(conv, number, sums.written, of_x=False)
            sums = sums._replace(written=None)
        else:
            grad = self.convolution(conv, number, kept.y if given is None else given, of_x=True)
            del given
            sums = self.sums(grad := tiles.dense(grad, kept.y), None, norm, kept)
        self.note(record.numbers[at - 1], sums)
        self.grad = abn.gradient(grad, norm, kept, sums, kernels=self.part.kernels)

    def convolution(self, conv: Conv, number: int, x: Any, *, of_x: bool, last: bool = True) -> Any:
        """Return `x`'s gradient, or None without `of_x`.

        The last call for a convolution also stores the weight's gradient, if the weight needs one.
        """
        assert self.grad is not None
        of_weight = last and self.saved[number].requires_grad
        grad_x = grad_weight = None
        if of_x or of_weight:  # if no gradient is needed, `x` may be None
            grad_x, grad_weight = conv.backward(self.grad, x, of_x, of_weight)
        if last:
            self.grad = None
        if grad_weight is not None:
            self.find(number, grad_weight)
        return grad_x

    def find(self, number: int, grad: Tensor) -> None:
        parameter = self.saved[number]
        if self.padding is not None:
            grad = crop_gradient(grad, parameter)
        self.found[number] = _in_dtype(grad, parameter.dtype)

    def shortcut(
        self,
        record: _Record,
        layer: Layer,
        masked: Tensor,
        x: Tensor,
        first: Tensor | None,
        live: bool,
    ) -> Tensor | None:
        """Run backward of the shortcut's layer and of the pool before it; return `x`'s gradient.

        Return None if the gradient is not needed, or if it was added to `first`. It is added if
        `first` is given, and a pool halves even H and W.
        """
        if record.of_shortcut is None:
            return None
        (conv, norm), kept = layer, self.take_all(record.of_shortcut)
        masked = tiles.dense(masked, kept.y)
        sums = self.sums(masked, None, norm, kept)
        self.note(record.numbers[-1], sums)
        self.grad = abn.gradient(masked, norm, kept, sums, kernels=self.part.kernels)
        del masked, kept, sums
        source = _halve(x) if record.block.halves else x
        grad = self.convolution(conv, record.numbers[-1], source, of_x=live)
        del source
        if grad is None or not record.block.halves:
            return grad
        if first is not None and x.shape[2] % 2 == x.shape[3] % 2 == 0:
            squares = first.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
            squares.add_(grad[:, :, :, None, :, None], alpha=0.25)
            return None
        form = [2, 2], [2, 2], [0, 0], True, False, None
        return torch.ops.aten.avg_pool2d_backward(grad, x, *form)

    def sums(
        self, grad: Tensor, second: Tensor | None, norm: Norm, kept: Kept, rebuilds: bool = False
    ) -> abn.Sums:
        return abn.gradient_sums(
            grad, second, norm, kept, kernels=self.part.kernels, rebuilds=rebuilds
        )

    def note(self, number: int, sums: abn.Sums) -> None:
        """Store the gradients of the parameters of a norm and of its SE."""
        merged = sums.merged
        for index, grad in enumerate((merged[0], merged[1], *(sums.se or ())), number + 1):
            self.find(index, grad)

    def input(self, index: int) -> Tensor:
        """Return the input of a block; if not kept, recompute the output of the block before."""
        record = self.records[index]
        kept = self.take(record.inputs)
        if kept is not None:
            return kept
        before: Any = self.records[index - 1]
        if not before.block.joins:
            shortcut = None
        elif before.block.shortcut is None:
            shortcut = self.saved[before.inputs]
        else:
            shortcut = self.rebuilt(before.block.shortcut, before.of_shortcut)
        if shortcut is not None and before.block.copies > 1:
            shortcut = shortcut.repeat(1, before.block.copies, 1, 1)
        return self.rebuilt(before.block.layers[-1], before.kept[-1], shortcut)

    def rebuilt(self, layer: Layer, place: int, shortcut: Tensor | None = None) -> Tensor:
        """Recompute the output of a layer, without freeing its saved tensors."""
        norm = layer.norm if self.padding is None else self.padding.norm(layer.norm)
        kept = _kept(self.saved, place)
        shortcut = None if shortcut is None else tiles.dense(shortcut, kept.y)
        return abn.rebuild(norm, kept, kernels=self.part.kernels, shortcut=shortcut)

    def take(self, number: int) -> Any:
        tensor, self.saved[number] = self.saved[number], None
        return tensor

    def take_all(self, place: int) -> Kept:
        kept = _kept(self.saved, place)
        self.saved[place : place + len(kept)] = [None] * len(kept)
        return kept


def _kept(saved: list[Any], place: int) -> Kept:
    return Kept(*saved[place : place + len(Kept._fields)])


def _differentiable(ctx: Any, saved: list[Any], grad: Tensor) -> list[Tensor | None]:
    """Return differentiable gradients, for which forward runs again by plain operators."""
    if ctx.part.kernels:
        raise InputError(
            "the kernels have no second derivatives: call model.set_impl('reference') before "
            "forward, or leave create_graph=True out of backward"
        )
    first = saved[ctx.records[0].inputs]
    y = _maps(ctx.part, first)
    if ctx.part.pads:  # the saved weights are not padded, but the input map may be
        y = y[:, : ctx.records[0].block.layers[0].conv.weight.shape[1]]
    for record in ctx.records:
        block, x = record.block, y
        shortcut = x
        if block.shortcut is not None:
            shortcut = _halve(x) if block.halves else x
            shortcut = _plain_layer(saved, block.shortcut, record.of_shortcut, shortcut)
        for layer, kept in zip(block.layers, record.kept, strict=True):
            y = _plain_layer(saved, layer, kept, y)
        if block.joins:
            passed = _kept(saved, record.kept[-1]).passed
            y = y if passed is None else y * passed[:, :, None, None].to(y.dtype)
            y = torch.relu(y + shortcut.repeat(1, block.copies, 1, 1))
    inputs = [first, *(p for record in ctx.records for p in record.block.parameters())]
    grad = grad[:, : y.shape[1]]  # `grad` may be padded
    # A tensor that layers share occurs once; its gradient is the sum over these layers.
    wanting = {id(t): t for t in inputs if t.requires_grad}
    grads = torch.autograd.grad(
        y, tuple(wanting.values()), grad, create_graph=True, allow_unused=True
    )
    found = dict(zip(wanting, grads, strict=True))
    return [found.pop(id(t), None) for t in inputs]


def _plain_layer(saved: list[Any], layer: Layer, place: int, x: Tensor) -> Tensor:
    conv, norm = layer
    assert norm.gamma is not None
    if norm.group is not None:
        raise InputError(
            "second derivatives need the statistics of one process, got synchronised ones"
        )
    running = None, None
    if not norm.training:
        stats = _kept(saved, place).stats
        assert stats is not None
        mean, _, _, var = stats[:, : len(norm.beta)]
        running = mean, var
    y = reference.abn(
        conv.forward(x), norm.gamma, norm.beta, *running, norm.training, 0.0, norm.eps, norm.slope
    )  # fmt: skip
    return reference.tail(y, norm.blur, norm.se, None)
