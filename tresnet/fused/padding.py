"""Padding of channels to multiples of 8, for tensor cores, within the fused program.

In tresnet_l and tresnet_xl, 8 does not divide all numbers of channels. Parameters, gradients,
running statistics and returned maps stay unpadded. Within a call, zeros follow the channels of a
tensor. A padded channel has weights, gamma and beta of 0, so its mean, variance, output and
gradient are 0. Its inverse standard deviation is 1 / sqrt(eps).

Each padded block adds about three short launches to forward and three to backward, so parts with
small inputs run unpadded.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tresnet.ops import tiles
from tresnet.ops.abn import Norm

if TYPE_CHECKING:
    from tresnet.fused.stage import Block, Layer

MULTIPLE = 8  # NVIDIA's guide to convolutions asks for multiples of 8 channels in 16 bits
# Padding saves time if the input has at least this many values. This is an estimate for the
# convolutions of tresnet_l, which do 700 multiply-adds for each value that they read.
FROM = 1 << 21  # about 14 images of 3 x 224 x 224 values


def padded(channels: int) -> int:
    """Return the least multiple of 8 that is not below `channels`."""
    return -(-channels // MULTIPLE) * MULTIPLE


def may_pad(block: "Block") -> bool:
    """Return whether padded channels stay 0: convolutions have one group, and no eps is about 0."""
    return all(
        conv.groups == 1 and (norm.gamma is None or norm.eps > 1e-30)
        for conv, norm in block.all_layers()
    )


def padded_shape(tensor: Tensor, *dims: int) -> tuple[int, ...]:
    """Return the shape that `tensor` has with `dims` padded."""
    return tuple(padded(n) if dim in dims else n for dim, n in enumerate(tensor.shape))


def pad_map(x: Tensor) -> Tensor:
    """Return a map (N, C, H, W) with zeros after its channels."""
    missing = -x.shape[1] % MULTIPLE
    return F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x  # keeps the memory format


def crop_map(x: Tensor, channels: int) -> Tensor:
    """Return the first `channels` of a map as a dense tensor."""
    if x.shape[1] == channels:
        return x
    return x[:, :channels].contiguous(memory_format=tiles.memory_format(x))


def crop_gradient(grad: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient without its padding; a matrix or filter gets the parameter's strides."""
    if grad.shape == parameter.shape:
        return grad
    corner = grad[tuple(map(slice, parameter.shape))]
    return corner if corner.dim() == 1 else torch.empty_like(parameter).copy_(corner)


def pad(
    tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]], dtype: torch.dtype
) -> list[Tensor]:
    """Return copies in `dtype` that are padded with zeros to `shapes` and share one buffer."""
    sizes = [math.prod(shape) for shape in shapes]
    found = []
    pieces = tensors[0].new_zeros(sum(sizes), dtype=dtype).split(sizes)
    for tensor, shape, piece in zip(tensors, shapes, pieces, strict=True):
        if tensor.dim() == 4 and tensor.stride(3) != 1:  # channels_last
            wide = piece.view(shape[0], *shape[2:], shape[1]).movedim(3, 1)
        else:
            wide = piece.view(shape)
        wide[tuple(map(slice, tensor.shape))].copy_(tensor)
        found.append(wide)
    return found


def store(module: nn.Module, name: str, *dims: int) -> None:
    """Replace a parameter by a view into a copy padded in `dims`; `stored` returns this copy."""
    own = module.get_parameter(name).detach()
    wide = pad([own], [padded_shape(own, *dims)], own.dtype)[0]
    setattr(module, name, nn.Parameter(wide[tuple(map(slice, own.shape))]))


def is_stored(weight: Tensor) -> bool:
    """Return whether `weight` may be a view into a larger tensor, as `store` makes it."""
    return weight.untyped_storage().nbytes() > weight.numel() * weight.itemsize


def stored(tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Return the padded tensor of which `tensor` is a view if it has this `shape`, or None."""
    size = math.prod(shape)
    if tensor.untyped_storage().nbytes() != size * tensor.itemsize or (
        tensor.stride(0) * shape[0] != size
    ):
        return None
    return tensor.as_strided(tuple(shape), tensor.stride())


class Padding:
    """Padded copies of the tensors of a part's norms and SEs, for one call."""

    def __init__(self, layers: Iterable["Layer"], dtype: torch.dtype, *, running: bool) -> None:
        """Pad the tensors of norms and SEs; `running` includes running statistics.

        All tensors padded in rows take 2 launches. K tensors padded in columns take K + 1 launches.
        """
        self._dtype = dtype
        self._wide: dict[int, Tensor] = {}
        self._running: list[Tensor] = []
        missing = list[Tensor](), list[Tensor]()  # missing[dim] is padded along `dim`
        for conv, norm in layers:
            if len(conv.weight) % MULTIPLE == 0:
                continue
            statistics = (norm.mean, norm.var) if running else ()
            rows = [norm.gamma, norm.beta, *statistics, *(norm.se or ())[2:]]
            columns = [] if norm.se is None else [norm.se.fc1_weight]
            for dim, tensors in enumerate((rows, columns)):
                for tensor in tensors:
                    if tensor is not None and not (norm.gamma is None and self._find(tensor, dim)):
                        missing[dim].append(tensor)
            if norm.momentum is not None:
                self._running += [t for t in (norm.mean, norm.var) if t is not None]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        rows, columns = missing
        if rows:
            self._pad_rows(rows, wide)
        if columns:
            shapes = [padded_shape(tensor, 1) for tensor in columns]
            self._wide |= zip(map(id, columns), pad(columns, shapes, wide), strict=True)

    def _find(self, tensor: Tensor, dim: int) -> bool:
        """Use the padded tensor that `store` made for `tensor`; return whether there is one."""
        wide = stored(tensor, padded_shape(tensor, dim))
        if wide is not None:
            self._wide[id(tensor)] = wide
        return wide is not None

    def _pad_rows(self, tensors: list[Tensor], dtype: torch.dtype) -> None:
        shapes = [padded_shape(tensor, 0) for tensor in tensors]
        sizes = [math.prod(shape) for shape in shapes]
        flat = tensors[0].new_zeros(sum(sizes), dtype=dtype)
        ends = [
            n
            for tensor, size in zip(tensors, sizes, strict=True)
            for n in (tensor.numel(), size - tensor.numel())
        ]
        torch._foreach_copy_(flat.split(ends)[::2], [t.reshape(-1) for t in tensors])
        for tensor, shape, piece in zip(tensors, shapes, flat.split(sizes), strict=True):
            self._wide[id(tensor)] = piece.view(shape)

    def block(self, block: "Block", x: Tensor) -> "Block":
        """Return `block` with padded tensors, for an input `x`; weights get the dtype of maps."""
        layers = block.all_layers()
        widths = [padded(len(conv.weight)) for conv, _ in layers]
        inputs = [x.shape[1], *widths[:-1]]
        if block.shortcut is not None:
            inputs[-1] = x.shape[1]
        weights = [conv.weight for conv, _ in layers]
        shapes = [
            (out, given, *weight.shape[2:])
            for out, given, weight in zip(widths, inputs, weights, strict=True)
        ]
        if all(weight.shape == shape for weight, shape in zip(weights, shapes, strict=True)):
            return block
        wide = None
        if layers[0].norm.gamma is None and weights[0].dtype == self._dtype:
            wide = [stored(weight, shape) for weight, shape in zip(weights, shapes, strict=True)]
        if wide is None or None in wide:
            wide = pad(weights, shapes, self._dtype)
        new = [
            layer._replace(conv=layer.conv._replace(weight=weight), norm=self.norm(layer.norm))
            for layer, weight in zip(layers, wide, strict=True)
        ]
        return block.with_layers(new)

    def norm(self, norm: Norm) -> Norm:
        """Return `norm` with its tensors padded."""
        if id(norm.beta) not in self._wide:
            return norm
        gamma, beta, mean, var, *se = (
            self._wide.get(id(tensor), tensor) for tensor in (*norm[:4], *(norm.se or ()))
        )
        return norm._replace(
            gamma=gamma, beta=beta, mean=mean, var=var, channels=len(norm.beta),
            se=None if norm.se is None else norm.se._make(se),
        )  # fmt: skip

    def write_back(self) -> None:
        """Copy updated running statistics back to their buffers."""
        if self._running:
            wide = [self._wide[id(tensor)][: len(tensor)] for tensor in self._running]
            torch._foreach_copy_(self._running, wide)
