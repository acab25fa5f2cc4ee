"""Consecutive blocks of a stage as one node of the autograd graph: a pure function of tensors.

Forward runs each layer: a convolution, then a norm with the operations after it. It saves the
outputs of convolutions and blocks, small tensors, and masks of the ReLUs with one bit for each
value. Backward reverses the order. The gradient of a convolution's weight needs the convolution's
input, which is the output of the norm before. The first pass of that norm's backward recomputes
this output, and the weight's gradient waits for that pass.

`StageFunction` reads no module and writes no buffer; `cast_and_pad` prepares its tensors.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor

from tresnet.errors import InputError
from tresnet.fused.block_specs import Block, Conv, Layer, Tensors
from tresnet.ops import tiles
from tresnet.ops.autocast import autocast_off
from tresnet.ops.epilogue import Epilogue, FirstPass, Saved


class Options(NamedTuple):
    """The module that computes norms, and whether backward recomputes activations."""

    ops: Any  # `tresnet.ops.epilogue`, its `definition`, or `first_use.checked_ops`
    recomputes: bool


class Record(NamedTuple):
    """Tensors that forward saves of one layer, apart from its block's input.

    Attributes:
        saved: The convolution's output y, the statistics, and what SE and the last ReLU need.
        out: The layer's output, if the next convolution of the block reads it, and backward does
            not recompute it.
    """

    saved: Saved
    out: Tensor | None


def forward_block(
    block: Block,
    x: Tensor,
    tensors: Tensors,
    options: Options,
    stats: list[Tensor],
    records: list[Record] | None,
) -> Tensor:
    """Run a block; append batch statistics to `stats`, and tensors for backward to `records`."""
    shortcut = y = x
    for index, (conv, indexed) in enumerate(block.layers):
        on_shortcut, epilogue = block.shortcut and index == 0, indexed.map(tensors.__getitem__)
        pools = on_shortcut and block.pools
        y = conv.forward(options.ops.avg_pool(y) if pools else y, tensors)
        last, residual = index == len(block.layers) - 1, {}
        if last and block.residual:
            scale = None if block.drop_path_scale is None else tensors[block.drop_path_scale]
            residual = {"shortcut": tiles.dense(shortcut), "drop_path_scale": scale}
        y, saved = options.ops.forward(y, epilogue, saves=records is not None, **residual)
        if epilogue.of_batch:
            stats.append(saved.stats)
        if records is not None:
            needs_out = not (options.recomputes or last or on_shortcut)
            records.append(Record(saved, y if needs_out else None))
        del saved
        if on_shortcut:
            shortcut, y = y, x
    return y


class Backward(NamedTuple):
    """Inputs of each step of backward, and the list to which it writes parameters' gradients.

    Attributes:
        ops: The module of `Options`.
        tensors: The tensors whose indices the blocks hold.
        needs_grad: For each tensor, whether it requires a gradient.
        gradients: For each tensor, its gradient, or None.
    """

    ops: Any
    tensors: Tensors
    needs_grad: Sequence[bool]
    gradients: list[Tensor | None]

    def run(
        self,
        blocks: Sequence[Block],
        inputs: list[Any],
        records: list[Record],
        grad: Tensor,
        needs_x: bool,
    ) -> Tensor | None:
        """Return the gradient of the input of the first block, or None unless `needs_x`.

        `grad` is the gradient of the last block's output. `inputs` holds each block's input, or
        None if it is recomputed. Lists are emptied from the end, so that tensors are freed after
        their last use.
        """
        out_grad: Any = tiles.dense(grad)
        second_grad = None  # of a block's second reader; `first_pass` adds it if there is a mask
        for number in reversed(range(len(blocks))):
            block, x, of_x = blocks[number], inputs.pop(), needs_x or number > 0
            if x is None:
                x = self.rebuild(blocks[number - 1].layers[-1], records[-1 - len(block.layers)])
            conv1_grad = masked_grad = waiting = None
            for index in reversed(range(len(block.layers))):
                (conv, indexed), saved = block.layers[index], records.pop().saved
                epilogue = indexed.map(self.tensors.__getitem__)
                if on_shortcut := block.shortcut and index == 0:
                    out_grad, conv1_grad, masked_grad = masked_grad, out_grad, None
                if second_grad is not None and saved.mask is None:
                    out_grad, second_grad = out_grad.add_(second_grad), None
                sums = self.first_pass(indexed, epilogue, saved, out_grad, second_grad, waiting)
                second_grad = waiting = None
                if sums.masked_grad is not None:
                    out_grad = masked_grad = sums.masked_grad
                y_grad = self.ops.gradient(out_grad, epilogue, saved, sums)
                del out_grad, saved, sums
                if index > block.shortcut:
                    before = block.layers[index - 1]
                    out_grad, waiting = self.inner_conv(conv, y_grad, before, records[-1])
                else:
                    pools = on_shortcut and block.pools
                    out_grad = self.conv(conv, y_grad, self.ops.avg_pool(x) if pools else x, of_x)
                del y_grad
            second_grad = masked_grad if of_x else None
            if block.shortcut:
                second_grad, out_grad = out_grad, conv1_grad
                if block.pools and of_x:
                    out_grad = self.ops.add_avg_pool_grad(out_grad, second_grad)
                    second_grad = None
        return out_grad if second_grad is None else out_grad.add_(second_grad)

    def first_pass(
        self,
        indexed: Epilogue,
        epilogue: Epilogue,
        saved: Saved,
        grad: Tensor,
        second: Tensor | None,
        waiting: Any,
    ) -> FirstPass:
        """Run the first pass of a norm's backward, and store the gradients of its tensors.

        `grad` and `second`, which may be None, are gradients of the norm's output, to be added.
        `waiting` is None, or the next convolution with the gradient of its output. The gradient of
        its weight then follows the pass, which recomputes the norm's output.
        """
        sums = self.ops.gradient_sums(grad, second, epilogue, saved, rebuilds=waiting is not None)
        for index, of_tensor in zip(indexed.tensors(), sums.grads, strict=True):
            self.store(index, of_tensor)
        if waiting is not None:
            conv, y_grad = waiting
            self.conv(conv, y_grad, sums.rebuilt, False)
        return sums._replace(rebuilt=None)

    def inner_conv(
        self, conv: Conv, y_grad: Tensor, before: Layer, record: Record
    ) -> tuple[Tensor | None, Any]:
        """Return the gradient of the input of a convolution behind the layer `before`.

        The weight's gradient needs this input, which forward saved, or `rebuild` recomputes behind
        a blur. Otherwise the second result is the `waiting` of `first_pass` of the layer before.
        """
        x = record.out
        if x is None and before.epilogue.blur:
            x = self.rebuild(before, record)
        if x is not None:
            return self.conv(conv, y_grad, x, True), None
        # the input's gradient reads only its shape, which is that of the output before the norm
        grad, _ = conv.backward(y_grad, record.saved.y, self.tensors, True, False)
        return grad, (conv, y_grad) if self.needs_grad[conv.weight] else None

    def conv(self, conv: Conv, y_grad: Tensor, x: Any, of_x: bool) -> Tensor | None:
        """Return the gradient of the input `x` of a convolution; store the weight's gradient."""
        of_weight = self.needs_grad[conv.weight]
        x_grad, weight_grad = conv.backward(y_grad, x, self.tensors, of_x, of_weight)
        self.store(conv.weight, weight_grad)
        return x_grad

    def rebuild(self, layer: Layer, record: Record) -> Tensor:
        """Recompute the output of a layer without a shortcut."""
        return self.ops.rebuild(layer.epilogue.map(self.tensors.__getitem__), record.saved)

    def store(self, index: Any, grad: Tensor | None) -> None:
        """Store the gradient of the tensor with this index, in the tensor's dtype."""
        if grad is not None and self.needs_grad[index]:
            self.gradients[index] = grad.to(self.tensors[index].dtype)


class StageFunction(torch.autograd.Function):
    """Autograd function of consecutive blocks; returns the output and batch statistics (4, C).

    These tensors are saved for backward, in this order:

        tensors | input of each block | records of all layers, each `Saved` and `Record.out`
    """

    @staticmethod
    def forward(
        ctx: Any, blocks: Sequence[Block], options: Options, x: Tensor, *tensors: Tensor | None
    ) -> Any:
        stats, inputs, records = list[Tensor](), list[Any](), list[Record]()
        recomputed = False
        for block in blocks:
            inputs.append(None if recomputed else x)
            x = forward_block(block, x, tensors, options, stats, records)
            recomputed = options.recomputes and not block.residual
        flat = chain.from_iterable((*saved, out) for saved, out in records)
        ctx.save_for_backward(*(saved := [*tensors, *inputs, *flat]))
        ctx.strides = [tensor if tensor is None else tensor.stride() for tensor in saved]
        ctx.blocks, ctx.options = blocks, options
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
        count, blocks = len(needs_grad), ctx.blocks
        saved: list[Any] = [*map(with_strides, ctx.saved_tensors, ctx.strides)]
        ctx.maybe_clear_saved_tensors()  # a no-op if the graph is retained
        tensors, inputs = saved[:count], saved[count : count + len(blocks)]
        size, flat = len(Saved._fields) + 1, saved[count + len(blocks) :]
        del saved
        records = [
            Record(Saved(*flat[i : i + size - 1]), flat[i + size - 1])
            for i in range(0, len(flat), size)
        ]
        del flat
        backward = Backward(ctx.options.ops, tensors, needs_grad, [None] * count)
        with autocast_off(grad.device.type):
            x_grad = backward.run(blocks, inputs, records, grad, needs_x)
        return None, None, x_grad, *backward.gradients


def with_strides(tensor: Tensor | None, stride: tuple[int, ...]) -> Tensor | None:
    """Return a saved tensor with the strides that it was saved with; hooks may change them.

    Kernels rely on these strides. Expanded weights, whose strides are 0, are read only by
    convolutions, which take any strides.
    """
    if tensor is None or tensor.stride() == stride or 0 in stride:
        return tensor
    return tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)
