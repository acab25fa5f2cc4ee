"""A row of blocks: convolutions, norms and shortcuts, without their tensors.

A row, and each `Norm` in it, holds the index of each tensor in place of the tensor (`Row.tensors`),
because saved-tensor hooks and checkpointing return other objects.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tresnet.ops import tiles
from tresnet.ops.abn import Norm

_convolution_backward = torch.ops.aten.convolution_backward.default
Tensors = Sequence[Any]  # those whose indices a row holds


class Conv(NamedTuple):
    """A convolution without bias, groups or dilation, with zero padding."""

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
        """Return gradients of `x` and the weight, or None; that of `x` reads only its shape."""
        if not (of_x or of_weight):
            return None, None
        return _convolution_backward(
            grad_y, x, tensors[self.weight], None, self.stride, self.padding, (1, 1), False, (0, 0),
            1, (of_x, of_weight, False),
        )[:2]  # fmt: skip


class Link(NamedTuple):
    """A norm, with all that follows it up to the next convolution, and this convolution."""

    norm: Norm
    conv: Conv


class Shortcut(NamedTuple):
    """A convolution and its norm beside a block; if `halves`, 2x2 pixels are averaged before."""

    conv: Conv
    norm: Norm
    halves: bool


class DropPath(NamedTuple):
    """Stochastic depth (arXiv 1603.09382): the probability of a drop, and whether to rescale."""

    rate: float
    scale_by_keep: bool


class Block(NamedTuple):
    """A convolution, links, and the last norm.

    If `joins`, the shortcut is added, and a ReLU is applied. Without a `Shortcut`, the block's
    input is added. `drop_path_scale` (N, 1) is a factor of each sample before the sum.
    """

    conv: Conv
    links: tuple[Link, ...]
    last: Norm
    joins: bool = False
    shortcut: Shortcut | None = None
    drop_path: DropPath | None = None
    drop_path_scale: int | None = None

    def layers(self) -> list[tuple[Conv, Norm]]:
        """Return each convolution with the norm after it, in the order of forward."""
        convs = [self.conv, *(link.conv for link in self.links)]
        norms = [*(link.norm for link in self.links), self.last]
        own = list(zip(convs, norms, strict=True))
        return own if self.shortcut is None else [self.shortcut[:2], *own]

    def indices(self) -> Iterator[int]:
        """Yield the indices of all tensors of the block."""
        for conv, norm in self.layers():
            yield conv.weight
            yield from (index for index in norm.tensors() if index is not None)
        if self.drop_path_scale is not None:
            yield self.drop_path_scale
