"""Consecutive blocks of a stage as one node of the autograd graph: a pure function of tensors.

`StageFunction` reads no module and writes no buffer; `prepare` casts and pads its tensors before.
Forward saves the outputs of convolutions and residual blocks, small tensors, and masks of the ReLUs
with one bit for each value. Backward takes the blocks in reverse order. A convolution's weight
gradient needs the output of the norm before the convolution, which the first pass of the norm's
backward can recompute. So a norm and the next convolution form a unit, the `NormConv`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor

from tresnet.errors import InputError
from tresnet.fused.blocks import Block, Conv, NormConv, Shortcut, Tensors
from tresnet.ops import tiles
from tresnet.ops.abn import Norm, Saved
from tresnet.ops.autocast import autocast_off


class Options(NamedTuple):
    """The module that computes norms, and whether backward recomputes activations."""

    ops: Any  # `tresnet.ops.abn`, or its `reference` in tests
    recomputes: bool


class Tape:
    """Stack of the tensors that forward saves; backward pops them, so that memory is freed.

    A `Saved`, the tensors of one norm, takes one entry for each field, even if the field is None.
    """

    def __init__(self, tensors: list[Any]) -> None:
        self.tensors = tensors

    def pop(self) -> Any:
        return self.tensors.pop()

    def pop_saved(self) -> Saved:
        """Remove and return the last `Saved`, the tensors of one norm."""
        saved = self.peek_saved(len(self.tensors))
        del self.tensors[-len(saved) :]
        return saved

    def peek_saved(self, end: int) -> Saved:
        """Return the `Saved` whose entries end before the index `end`, without removing it."""
        return Saved(*self.tensors[end - len(Saved._fields) : end])


def as_saved(tensor: Tensor | None) -> Tensor | None:
    """Return a contiguous tensor for the kernels; a saved-tensor hook may have changed strides.

    A filter of several pixels is returned unchanged, because a convolution takes any strides.
    """
    spatial = tensor is not None and tensor.shape[2:].numel() > 1
    return tensor if tensor is None or spatial else tensor.contiguous()


def map_as_saved(tensor: Tensor | None) -> Tensor | None:
    """Return a feature map dense in channels_last memory; return any other tensor contiguous."""
    if tensor is None:
        return None
    return tiles.dense(tensor) if tensor.dim() == 4 else tensor.contiguous()


def avg_pool(x: Tensor) -> Tensor:
    """Average 2x2 pixels with stride 2; if H or W is odd, squares at the border are smaller."""
    return F.avg_pool2d(x, 2, 2, ceil_mode=True, count_include_pad=False)


def forward_block(
    block: Block,
    x: Tensor,
    tensors: Tensors,
    options: Options,
    stats: list[Tensor],
    tape: list[Any] | None,
) -> Tensor:
    """Run a block; append batch statistics to `stats`, and tensors for backward to `tape`."""

    def run_norm(spec: Norm, y: Tensor, **residual: Any) -> Tensor:
        norm = spec.map(tensors.__getitem__)
        out, saved = options.ops.forward(y, norm, saves=tape is not None, **residual)
        if norm.of_batch:
            stats.append(saved.stats)  # pyright: ignore[reportArgumentType]
        if tape is not None:
            tape.extend(saved)
        return out

    shortcut = x
    if block.shortcut is not None:
        conv, norm, pools = block.shortcut
        shortcut = run_norm(norm, conv.forward(avg_pool(x) if pools else x, tensors))
    y = block.conv.forward(x, tensors)
    for norm, conv in block.norm_convs:
        y = run_norm(norm, y)
        if tape is not None and not options.recomputes:
            tape.append(y)
        y = conv.forward(y, tensors)
    if not block.residual:
        return run_norm(block.last_norm, y)
    scale = None if block.drop_path_scale is None else tensors[block.drop_path_scale]
    return run_norm(block.last_norm, y, shortcut=tiles.dense(shortcut), drop_path_scale=scale)


class Backward:
    """Backward of consecutive blocks, which the caller takes in reverse order.

    Args:
        options: The options of forward.
        tensors: The tensors whose indices the blocks hold.
        needs_grad: For each tensor, whether it requires a gradient.
        tape: The tensors that forward saved.
    """

    def __init__(
        self, options: Options, tensors: Tensors, needs_grad: Sequence[bool], tape: Tape
    ) -> None:
        self.ops, self.recomputes = options
        self.tensors, self.needs_grad, self.tape = tensors, needs_grad, tape
        self.gradients: list[Tensor | None] = [None] * len(tensors)
        self.grad: Any = None  # gradient of the output of the next convolution in reverse order

    def store_grad(self, index: Any, grad: Tensor | None) -> None:
        """Store the gradient of the tensor with this index, in the tensor's dtype."""
        if grad is not None and self.needs_grad[index]:
            dtype = self.tensors[index].dtype
            self.gradients[index] = grad if grad.dtype is dtype else grad.to(dtype)

    def norm(
        self, spec: Norm, saved: Saved, grads: list[Any], reader: Conv | None = None
    ) -> Tensor | None:
        """Run a norm's backward: set `self.grad` to the gradient of the norm's input.

        `grads` is a list of two gradients of the norm's output, of which the second may be None.
        Both are added, and the list is emptied to free memory. `reader` is a convolution that reads
        the norm's output, and whose weight needs a gradient. With a reader, the norm's output is
        recomputed, and on entry `self.grad` is the gradient of the reader's output. Return the
        gradient of the sum before the ReLU if forward added a shortcut, and otherwise None.
        """
        norm = spec.map(self.tensors.__getitem__)
        grad: Any = tiles.dense(grads[0])
        second: Any = None if grads[1] is None else tiles.dense(grads[1])
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
        """Run a convolution's backward from `self.grad`; return the gradient of its input `x`."""
        needs_weight = self.needs_grad[conv.weight]
        grad_x, grad_weight = conv.backward(self.grad, x, self.tensors, of_x, needs_weight)
        self.store_grad(conv.weight, grad_weight)
        self.grad = None
        return grad_x

    def block(self, block: Block, x: Tensor, grads: list[Any], of_x: bool) -> list[Any]:
        """Return the gradients of `x` through the first convolution and the shortcut, to be added.

        `grads` is a list of two gradients of the block's output, of which the second may be None.
        Both are added, and the list is emptied to free memory.
        """
        # `self.shortcut` empties this list to free the gradient before a convolution runs
        masked_grad = [self.norm(block.last_norm, self.tape.pop_saved(), grads)]
        for pair in reversed(block.norm_convs):
            self.norm_conv(pair)
        grad_x = self.convolution(block.conv, x, of_x)
        if block.shortcut is None:
            return [grad_x, masked_grad[0] if of_x else None]
        return [grad_x, self.shortcut(block.shortcut, masked_grad, x, grad_x)]

    def norm_conv(self, pair: NormConv) -> None:
        """Run the backward of a convolution, then the backward of the norm before the convolution.

        The weight's gradient needs the convolution's input, which is recomputed unless forward
        saved it. With a blur, `rebuild` recomputes the input. Otherwise the first pass of the
        norm's backward recomputes the input, and the weight's gradient follows that pass.
        """
        norm, conv = pair
        x = None if self.recomputes else self.tape.pop()
        saved = self.tape.pop_saved()
        if x is None and norm.blur:
            x = self.ops.rebuild(norm.map(self.tensors.__getitem__), saved)
        if x is not None or not self.needs_grad[conv.weight]:
            grad = self.convolution(conv, saved.y if x is None else x, True)
            del x
            self.norm(norm, saved, [grad, None])
        else:  # the gradient of the convolution's input reads only a shape, which `y` has
            grad, _ = conv.backward(self.grad, saved.y, self.tensors, True, False)
            self.norm(norm, saved, [grad, None], reader=conv)

    def shortcut(
        self, shortcut: Shortcut, grads: list[Any], x: Tensor, grad_x: Tensor | None
    ) -> Tensor | None:
        """Run the shortcut's backward; return the gradient of `x`, or add it to `grad_x`.

        With a pool and even H and W, the gradient is added to `grad_x`, and None is returned.
        `grads` holds the gradient of the shortcut's output, and is emptied to free memory.
        """
        conv, norm, pools = shortcut
        grads.append(None)
        self.norm(norm, self.tape.pop_saved(), grads)
        grad = self.convolution(conv, avg_pool(x) if pools else x, grad_x is not None)
        if grad is None or grad_x is None or not pools:
            return grad
        if x.shape[2] % 2 == x.shape[3] % 2 == 0:
            squares = grad_x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
            squares.add_(grad[:, :, :, None, :, None], alpha=0.25)
            return None
        pool = [2, 2], [2, 2], [0, 0], True, False, None
        return torch.ops.aten.avg_pool2d_backward(grad, x, *pool)


class StageFunction(torch.autograd.Function):
    """Autograd function of consecutive blocks; returns the output and batch statistics (4, C)."""

    @staticmethod
    def forward(
        ctx: Any, blocks: list[Block], options: Options, x: Tensor, *tensors: Tensor | None
    ) -> Any:
        tape, stats, inputs, starts = list[Any](), list[Tensor](), list[Any](), list[int]()
        recomputed = False
        for block in blocks:
            inputs.append(None if recomputed else x)
            starts.append(len(tape))
            x = forward_block(block, x, tensors, options, stats, tape)
            recomputed = options.recomputes and not block.residual
        ctx.save_for_backward(*tensors, *inputs, *tape)
        ctx.blocks, ctx.options, ctx.starts = blocks, options, starts
        ctx.hooked = _top_saved_tensors_default_hooks(False) is not None
        ctx.mark_non_differentiable(*stats)
        ctx.set_materialize_grads(False)
        return x, *stats

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor | None, *_: None
    ) -> tuple[Any, ...]:
        """Return the gradients of all inputs; free each saved tensor after its last use."""
        if torch.is_grad_enabled():
            raise InputError(
                "the fused kernels have no second derivatives: build the model with "
                "norm='batchnorm', or leave create_graph=True out of backward"
            )
        needs_x, *needs_grad = ctx.needs_input_grad[2:]
        if grad is None:
            return None, None, None, *[None] * len(needs_grad)
        if is_batchedtensor(grad) or is_legacy_batchedtensor(grad):
            raise InputError(
                "the fused kernels compute one gradient at a time: build the model with "
                "impl='plain', or leave is_grads_batched=True and torch.vmap out of backward"
            )
        saved, blocks, count = list(ctx.saved_tensors), ctx.blocks, len(needs_grad)
        if ctx.hooked:
            saved = [*map(as_saved, saved[:count]), *map(map_as_saved, saved[count:])]
        ctx.maybe_clear_saved_tensors()  # a no-op if the graph is retained
        tensors, inputs = saved[:count], saved[count : count + len(blocks)]
        tape = Tape(saved[count + len(blocks) :])
        del saved
        grads: list[Any] = [grad, None]
        del grad
        with autocast_off(grads[0].device.type):
            backward = Backward(ctx.options, tensors, needs_grad, tape)
            for index in reversed(range(len(blocks))):
                x = inputs.pop()
                if x is None:  # recompute the output of the block before, which is not residual
                    before = blocks[index - 1].last_norm.map(tensors.__getitem__)
                    x = backward.ops.rebuild(before, tape.peek_saved(ctx.starts[index]))
                grads = backward.block(blocks[index], x, grads, needs_x or index > 0)
        first, second = grads
        if first is not None and second is not None:
            first = first.add_(second)
        return None, None, first, *backward.gradients


def run_blocks(
    blocks: list[Block], tensors: list[Any], maps: list[Tensor], options: Options
) -> list[Tensor]:
    """Replace the map in `maps` by the output of the blocks; return batch statistics (4, C).

    Blocks before the first tensor that requires a gradient save nothing for backward.
    """
    x, stats, first = maps.pop(), list[Tensor](), 0
    needs_grad = torch.is_grad_enabled() and x.requires_grad
    while first < len(blocks) and not needs_grad:
        block = blocks[first]
        if torch.is_grad_enabled():
            needs_grad = any(tensors[index].requires_grad for index in block.indices())
        if not needs_grad:
            x = forward_block(block, x, tensors, options, stats, None)
            first += 1
    if first < len(blocks):
        if first:
            used = {index for block in blocks[first:] for index in block.indices()}
            tensors = [t if index in used else None for index, t in enumerate(tensors)]
        x, *of_stage = cast(Any, StageFunction.apply(blocks[first:], options, x, *tensors))
        stats += of_stage
    maps.append(x)
    return stats
