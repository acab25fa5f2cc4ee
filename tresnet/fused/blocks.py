"""Residual blocks as tuples: convolutions, norms and shortcuts, with indices in place of tensors.

A `Conv` and a `Norm` hold indices into a list, `FusedBlocks.tensors`. They cannot hold tensors,
because saved-tensor hooks and activation checkpointing replace tensors by other objects.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tresnet.layers.norm import ABN
from tresnet.ops import tiles
from tresnet.ops.abn import Norm

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
        return _convolution_backward(
            grad_y, x, tensors[self.weight], None, self.stride, self.padding, (1, 1), False, (0, 0),
            1, (of_x, of_weight, False),
        )[:2]  # fmt: skip


class NormConv(NamedTuple):
    """A batch norm with the operations after it, and the convolution that reads their output."""

    norm: Norm
    conv: Conv


class Shortcut(NamedTuple):
    """A shortcut's convolution and norm; with `pools`, a 2x2 average pool of stride 2 is first."""

    conv: Conv
    norm: Norm
    pools: bool


class DropPath(NamedTuple):
    """Stochastic depth (arXiv 1603.09382): drop rate, and whether to rescale other samples."""

    rate: float
    scale_by_keep: bool


class Block(NamedTuple):
    """A convolution, then pairs of a norm and a convolution, then the last norm.

    A `residual` block adds its input, or the output of its `shortcut`, and applies a ReLU.
    `drop_path_scale` is the index of a tensor (N, 1), which multiplies each sample before the block
    adds its input or shortcut.
    """

    conv: Conv
    norm_convs: tuple[NormConv, ...]
    last_norm: Norm
    residual: bool = False
    shortcut: Shortcut | None = None
    drop_path: DropPath | None = None
    drop_path_scale: int | None = None

    def layers(self) -> list[tuple[Conv, Norm]]:
        """Return each convolution with the norm after it, in the order of forward."""
        convs = [self.conv, *(pair.conv for pair in self.norm_convs)]
        norms = [*(pair.norm for pair in self.norm_convs), self.last_norm]
        own = list(zip(convs, norms, strict=True))
        return own if self.shortcut is None else [self.shortcut[:2], *own]

    def indices(self) -> Iterator[int]:
        for conv, norm in self.layers():
            yield conv.weight
            yield from (index for index in norm.tensors() if index is not None)
        if self.drop_path_scale is not None:
            yield self.drop_path_scale


class FusedBlocks(NamedTuple):
    """Consecutive blocks, and the list `tensors` to which the indices in the blocks refer.

    `weights` are the indices of convolution weights. `batch_norms` are the norms in training mode,
    in the order of forward. `eval_norms` are the norms in eval mode, each with the index in
    `tensors` at which `Norm.stats` is set. The input has `channels` channels, the output has
    `out_channels`, and feature maps have `dtype`. If `folded`, convolutions include the norms.
    """

    blocks: list[Block]
    tensors: list[Any]
    weights: list[int]
    batch_norms: list[ABN]
    eval_norms: list[tuple[int, ABN]]
    channels: int
    out_channels: int
    dtype: torch.dtype
    folded: bool
