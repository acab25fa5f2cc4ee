"""Residual blocks as tuples: layers and shortcuts, with indices in place of tensors.

A bottleneck that halves its input, for example; a basic block has two layers in the lower row:

    x -- pool -- layers[0]: 1x1, norm -------------------------------------------------- + -- ReLU
     '-- layers[1]: 1x1, norm -- layers[2]: 3x3, norm, blur, SE -- layers[3]: 1x1, norm -'

`Block.layers` has the order of forward, and backward reverses it. Tuples hold indices into the list
`FusedBlocks.tensors`. They cannot hold tensors, because saved-tensor hooks and activation
checkpointing replace tensors by other objects.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tresnet.layers.norm import ABN
from tresnet.ops import tiles
from tresnet.ops.epilogue import Epilogue

_convolution_backward = torch.ops.aten.convolution_backward.default
Tensors = Sequence[Any]  # the tensors whose indices blocks hold


class Conv(NamedTuple):
    """A convolution whose input is padded with zeros, without bias, groups or dilation."""

    weight: int
    stride: tuple[int, int]
    padding: tuple[int, int]

    def forward(self, x: Tensor, tensors: Tensors) -> Tensor:
        """Convolve `x`, which has the dtype of the weight."""
        weight = tensors[self.weight]
        return tiles.dense(torch.conv2d(x, weight, None, self.stride, self.padding))

    def backward(
        self, grad_y: Tensor, x: Tensor, tensors: Tensors, of_x: bool, of_weight: bool
    ) -> tuple[Any, Any]:
        """Return gradients of `x` (None unless `of_x`) and the weight (None unless `of_weight`).

        The gradient of `x` depends on the shape of `x`, but not on its values.
        """
        if not (of_x or of_weight):
            return None, None
        x_grad, weight_grad, _ = _convolution_backward(
            grad_y, x, tensors[self.weight], None, self.stride, self.padding, (1, 1), False, (0, 0),
            1, (of_x, of_weight, False),
        )  # fmt: skip
        return tiles.dense(x_grad) if of_x else None, weight_grad


class Layer(NamedTuple):
    """A convolution, and the operations after it."""

    conv: Conv
    epilogue: Epilogue


class DropPath(NamedTuple):
    """Stochastic depth (arXiv 1603.09382): drop rate, and whether to rescale other samples."""

    rate: float
    scale_by_keep: bool


class Block(NamedTuple):
    """Layers in the order of forward, the shortcut's layer first if the block has one.

    Attributes:
        layers: The layers; each reads the output of the layer before.
        residual: Whether the block's input, or the shortcut's output, is added to the last layer's
            output, in front of a ReLU.
        shortcut: Whether `layers[0]` is on the shortcut. It and `layers[1]` read the block's input.
        pools: Whether the shortcut's layer reads the block's input after a 2x2 average pool.
        drop_path: Stochastic depth of the last layer's output, in training.
        drop_path_scale: Index of a tensor (N, 1), the factor of `drop_path` for each sample.
    """

    layers: tuple[Layer, ...]
    residual: bool = False
    shortcut: bool = False
    pools: bool = False
    drop_path: DropPath | None = None
    drop_path_scale: int | None = None

    def indices(self) -> Iterator[int]:
        for conv, epilogue in self.layers:
            yield conv.weight
            yield from (index for index in epilogue.tensors() if index is not None)
        if self.drop_path_scale is not None:
            yield self.drop_path_scale


class EvalNorm(NamedTuple):
    """A norm in eval mode, and the indices of its gamma and of the `Epilogue.stats` to be set."""

    stats: int
    gamma: int
    module: ABN


class FusedBlocks(NamedTuple):
    """Consecutive blocks, and the list `tensors` to which the indices in the blocks refer.

    Attributes:
        blocks: The blocks, which run one after another.
        tensors: Parameters of the modules, and None where `EvalNorm.stats` points.
        weights: Indices of convolution weights.
        batch_norms: Norms in training mode, in the order of forward.
        eval_norms: Norms in eval mode.
        channels: Number of the input's channels.
        out_channels: Number of the output's channels.
        dtype: The dtype of feature maps.
        folded: Whether convolutions include the norms.
        padded: Whether channels are padded to multiples of 8.
    """

    blocks: list[Block]
    tensors: list[Any]
    weights: list[int]
    batch_norms: list[ABN]
    eval_norms: list[EvalNorm]
    channels: int
    out_channels: int
    dtype: torch.dtype
    folded: bool
    padded: bool = False
