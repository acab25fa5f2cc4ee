"""Consecutive blocks as one node of the autograd graph: a pure function of tensors.

`Stage` reads no module, writes no buffer, and knows neither dtypes nor padding. Forward saves the
output of each convolution and of each block with a shortcut, a bit of each value that a ReLU
passed, and small tensors. Backward walks the same row from its end. Its unit is `Link`, a norm and
the convolution that reads its output: the gradient of the convolution's weight needs that output,
which the first pass of the norm's backward writes again.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor

from tresnet.errors import InputError
from tresnet.fused.row import Block, Conv, Link, Shortcut, Tensors
from tresnet.ops import tiles
from tresnet.ops.abn import Norm, Saved
from tresnet.ops.autocast import autocast_off


class Options(NamedTuple):
    """The module that computes norms, and whether backward recomputes activations.

    The module is `tresnet.ops.abn`, or in tests its `reference`.
    """

    ops: Any
    recomputes: bool


class Tape:
    """Tensors that forward saves, in order; backward takes them from the end, which frees them.

    A `Saved` is as many entries as it has fields; those that are None count.
    """

    def __init__(self, tensors: list[Any]) -> None:
        self.tensors = tensors

    def take(self) -> Any:
        """Return the last tensor, and remove it."""
        return self.tensors.pop()

    def take_saved(self) -> Saved:
        """Return the last `Saved`, and remove it."""
        saved = self.peek_saved(len(self.tensors))
        del self.tensors[-len(saved) :]
        return saved.restored()

    def peek_saved(self, end: int) -> Saved:
        """Return the `Saved` of the block before the one whose entries start at `end`; keep it."""
        return Saved(*self.tensors[end - len(Saved._fields) : end])


def as_saved(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor dense, as forward saved it; a saved-tensor hook may return other strides.

    A filter of several pixels is returned as it is: a convolution takes any strides.
    """
    spatial = tensor is not None and tensor.shape[2:].numel() > 1
    return tensor if tensor is None or spatial else tensor.contiguous()


def map_as_saved(tensor: Tensor | None) -> Tensor | None:
    """Return a map dense in its memory format, and a mask, statistics or gates contiguous."""
    if tensor is None or tensor.dim() != 4 or tensor.dtype == torch.uint8:
        return tensor if tensor is None else tensor.contiguous()  # also a mask of four dimensions
    return tiles.dense(tensor)


def halve(x: Tensor) -> Tensor:
    """Average 2x2 pixels; a window that crosses the border averages its pixels inside `x`."""
    return F.avg_pool2d(x, 2, 2, ceil_mode=True, count_include_pad=False)


def forward_block(
    block: Block,
    x: Tensor,
    tensors: Tensors,
    options: Options,
    stats: list[Tensor],
    tape: list[Any] | None,
) -> Tensor:
    """Run a block; append batch statistics to `stats`, and what backward reads to `tape`."""

    def follow(spec: Norm, y: Tensor, **join: Any) -> Tensor:
        norm = spec.map(tensors.__getitem__)
        out, saved = options.ops.forward(y, norm, saves=tape is not None, **join)
        if norm.of_batch:
            stats.append(saved.stats)  # pyright: ignore[reportArgumentType]
        if tape is not None:
            tape.extend(saved)
        return out

    shortcut = x
    if block.shortcut is not None:
        conv, norm, halves = block.shortcut
        shortcut = follow(norm, conv.forward(halve(x) if halves else x, tensors))
    y = block.conv.forward(x, tensors)
    for norm, conv in block.links:
        y = follow(norm, y)
        if tape is not None and not options.recomputes:
            tape.append(y)
        y = conv.forward(y, tensors)
    if not block.joins:
        return follow(block.last, y)
    scale = None if block.drop_path_scale is None else tensors[block.drop_path_scale]
    return follow(block.last, y, shortcut=tiles.dense(shortcut, y), drop_path_scale=scale)


class Backward:
    """Backward of a row of blocks, from its end.

    Args:
        options: Those of forward.
        tensors: The tensors whose indices the row holds.
        needs_grad: For each tensor, whether it requires a gradient.
        tape: What forward saved.
    """

    def __init__(
        self, options: Options, tensors: Tensors, needs_grad: Sequence[bool], tape: Tape
    ) -> None:
        self.ops, self.recomputes = options
        self.tensors, self.needs_grad, self.tape = tensors, needs_grad, tape
        self.gradients: list[Tensor | None] = [None] * len(tensors)
        self.grad: Any = None  # the gradient of the present convolution's output

    def store_grad(self, index: Any, grad: Tensor | None) -> None:
        """Store the gradient of the tensor with this index, in the tensor's dtype."""
        if grad is not None and self.needs_grad[index]:
            dtype = self.tensors[index].dtype
            self.gradients[index] = grad if grad.dtype is dtype else grad.to(dtype)

    def norm(
        self, spec: Norm, saved: Saved, grads: list[Any], reader: Conv | None = None
    ) -> Tensor | None:
        """Run a norm's backward: from gradients of its output to `self.grad`, that of its input.

        The one or two gradients in `grads` are added, and are removed from the list. With `reader`,
        the convolution that reads the output, the first pass also rebuilds the output. Then the
        weight's gradient is computed from it and `self.grad`, which is still the gradient of the
        reader's output. If forward added a shortcut, the gradient behind its ReLU is returned.
        """
        norm = spec.map(self.tensors.__getitem__)
        grad: Any = tiles.dense(grads[0], saved.y)
        second: Any = None if grads[1] is None else tiles.dense(grads[1], saved.y)
        grads.clear()
        if second is not None and saved.mask is None:
            grad, second = grad.add_(second), None
        rebuilds = reader is not None
        sums = self.ops.gradient_sums(grad, second, norm, saved, rebuilds=rebuilds)
        del second
        for index, of_tensor in zip(spec.tensors(), sums.grads, strict=True):
            self.store_grad(index, of_tensor)
        if reader is not None:
            self.convolution(reader, sums.rebuilt, False)  # pyright: ignore[reportArgumentType]
            sums = sums._replace(rebuilt=None)
        if sums.masked_grad is not None:
            grad = sums.masked_grad
        self.grad = self.ops.gradient(grad, norm, saved, sums)
        return sums.masked_grad

    def convolution(self, conv: Conv, x: Tensor, of_x: bool) -> Tensor | None:
        """Run a convolution's backward from `self.grad`, which is freed; return that of `x`."""
        needs_weight = self.needs_grad[conv.weight]
        grad_x, grad_weight = conv.backward(self.grad, x, self.tensors, of_x, needs_weight)
        self.store_grad(conv.weight, grad_weight)
        self.grad = None
        return grad_x

    def block(self, block: Block, x: Tensor, grads: list[Any], of_x: bool) -> list[Any]:
        """Return two gradients of `x`: through the first convolution, and through the shortcut.

        `grads` are the two gradients of the output, which this method removes from the list.
        """
        # `shortcut` takes the gradient out of this list, to free it before its convolution
        masked_grad = [self.norm(block.last, self.tape.take_saved(), grads)]
        for link in reversed(block.links):
            self.link(link)
        grad_x = self.convolution(block.conv, x, of_x)
        if block.shortcut is None:
            return [grad_x, masked_grad[0] if of_x else None]
        return [grad_x, self.shortcut(block.shortcut, masked_grad, x, grad_x)]

    def link(self, link: Link) -> None:
        """Run backward of a convolution, then of the norm before it.

        The convolution's input is recomputed, unless it was saved. Behind a blur, `rebuild` does it
        alone. Otherwise the first pass of the norm's backward writes it, between the two halves of
        the convolution's backward.
        """
        norm, conv = link
        x = None if self.recomputes else self.tape.take()
        saved = self.tape.take_saved()
        if x is None and norm.blur:
            x = self.ops.rebuild(norm.map(self.tensors.__getitem__), saved)
        if x is not None or not self.needs_grad[conv.weight]:
            grad = self.convolution(conv, saved.y if x is None else x, True)
            del x
            self.norm(norm, saved, [grad, None])
        else:  # `y` has the shape of the input, which is all that its gradient reads
            grad, _ = conv.backward(self.grad, saved.y, self.tensors, True, False)
            self.norm(norm, saved, [grad, None], reader=conv)

    def shortcut(
        self, shortcut: Shortcut, grads: list[Any], x: Tensor, grad_x: Tensor | None
    ) -> Tensor | None:
        """Run the shortcut's backward; return `x`'s gradient, or add it to `grad_x`.

        It is added if `grad_x` is given, `halves` is set, and H and W are even. The gradient in
        `grads` is removed from the list.
        """
        conv, norm, halves = shortcut
        grads.append(None)
        self.norm(norm, self.tape.take_saved(), grads)
        grad = self.convolution(conv, halve(x) if halves else x, grad_x is not None)
        if grad is None or grad_x is None or not halves:
            return grad
        if x.shape[2] % 2 == x.shape[3] % 2 == 0:
            squares = grad_x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
            squares.add_(grad[:, :, :, None, :, None], alpha=0.25)
            return None
        pool = [2, 2], [2, 2], [0, 0], True, False, None
        return torch.ops.aten.avg_pool2d_backward(grad, x, *pool)


class Stage(torch.autograd.Function):
    """A row of blocks; returns the last output, then the statistics (4, C) of each batch norm."""

    @staticmethod
    def forward(
        ctx: Any, row: list[Block], options: Options, x: Tensor, *tensors: Tensor | None
    ) -> Any:
        """Run the row, whose blocks hold indices of `tensors`."""
        tape, stats, inputs, starts = list[Any](), list[Tensor](), list[Any](), list[int]()
        recomputed = False
        for block in row:
            inputs.append(None if recomputed else x)
            starts.append(len(tape))
            x = forward_block(block, x, tensors, options, stats, tape)
            recomputed = options.recomputes and not block.joins
        ctx.save_for_backward(*tensors, *inputs, *tape)
        ctx.row, ctx.options, ctx.starts = row, options, starts
        ctx.hooked = _top_saved_tensors_default_hooks(False) is not None
        ctx.mark_non_differentiable(*stats)
        ctx.set_materialize_grads(False)
        return x, *stats

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor | None, *_: None
    ) -> tuple[Any, ...]:
        """Return gradients of `x` and the tensors; free each saved tensor after its last use."""
        if torch.is_grad_enabled():
            raise InputError(
                "the fused program has no second derivatives: build the model with "
                "norm='batchnorm', or leave create_graph=True out of backward"
            )
        needs_x, *needs_grad = ctx.needs_input_grad[2:]
        if grad is None:
            return None, None, None, *[None] * len(needs_grad)
        if is_batchedtensor(grad) or is_legacy_batchedtensor(grad):
            raise InputError(
                "the fused program computes one gradient at a time: build the model with "
                "impl='plain', or leave is_grads_batched=True and torch.vmap out of backward"
            )
        saved, row, count = list(ctx.saved_tensors), ctx.row, len(needs_grad)
        if ctx.hooked:
            saved = [*map(as_saved, saved[:count]), *map(map_as_saved, saved[count:])]
        ctx.maybe_clear_saved_tensors()  # a no-op if the graph is retained
        tensors, inputs = saved[:count], saved[count : count + len(row)]
        tape = Tape(saved[count + len(row) :])
        del saved
        grads: list[Any] = [grad, None]
        del grad
        with autocast_off(grads[0].device.type):
            walk = Backward(ctx.options, tensors, needs_grad, tape)
            for index in reversed(range(len(row))):
                x = inputs.pop()
                if x is None:  # the output of the block before, which has no shortcut
                    before = row[index - 1].last.map(tensors.__getitem__)
                    x = walk.ops.rebuild(before, tape.peek_saved(ctx.starts[index]))
                grads = walk.block(row[index], x, grads, needs_x or index > 0)
        first, second = grads
        if first is not None and second is not None:
            first = first.add_(second)
        return None, None, first, *walk.gradients


def run_blocks(
    row: list[Block], tensors: list[Any], maps: list[Tensor], options: Options
) -> list[Tensor]:
    """Replace the map in `maps` by the row's output; return the batch statistics of its norms.

    Blocks in front of the first tensor that requires a gradient save nothing for backward.
    """
    x, stats, first = maps.pop(), list[Tensor](), 0
    needs_grad = torch.is_grad_enabled() and x.requires_grad
    while first < len(row) and not needs_grad:
        block = row[first]
        if torch.is_grad_enabled():
            needs_grad = any(tensors[index].requires_grad for index in block.indices())
        if not needs_grad:
            x = forward_block(block, x, tensors, options, stats, None)
            first += 1
    if first < len(row):
        if first:
            used = {index for block in row[first:] for index in block.indices()}
            tensors = [t if index in used else None for index, t in enumerate(tensors)]
        x, *of_stage = cast(Any, Stage.apply(row[first:], options, x, *tensors))
        stats += of_stage
    maps.append(x)
    return stats
