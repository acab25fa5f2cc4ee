"""Casts and padding of the parameters of consecutive blocks, by one autograd node.

Convolution weights are cast to the feature maps' dtype; other parameters keep their dtype. In
tresnet_l and tresnet_xl, some numbers of channels are no multiples of 8, so tensors are padded with
zeros. A padded channel has weights, gamma and beta of 0, so its mean, variance, output and gradient
are 0. Parameters, gradients, running statistics and returned maps are not padded. Multi-tensor
copies fill the cast and padded tensors in forward, and the parameters' gradients in backward.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tresnet.fused.block_specs import Block, FusedBlocks
from tresnet.ops import tiles

MULTIPLE = 8  # NVIDIA's guide to convolutions asks for multiples of 8 channels in 16 bits
# Padding saves time if the input has at least this many values. This is an estimate for the
# convolutions of tresnet_l, which do 700 multiply-adds for each value that they read.
PAD_FROM_VALUES = 1 << 21  # about 14 images of 3 x 224 x 224 values
CopySpec = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape of a parameter's copy


def padded_width(channels: int) -> int:
    """Return the least multiple of 8 that is at least `channels`."""
    return -(-channels // MULTIPLE) * MULTIPLE


def enter(fused: FusedBlocks, x: Tensor) -> tuple[FusedBlocks, Tensor]:
    """Prepare a map (N, C, H, W) for blocks: cast and pad it, and set `FusedBlocks.padded`.

    If `x` is padded, the blocks are, too. Otherwise they are padded if a width is no multiple of 8,
    and `x` has at least `PAD_FROM_VALUES` values. A stem's input is not padded.
    """
    x = tiles.dense(x.to(fused.dtype))
    widths = (fused.tensors[index].shape[0] for index in fused.weights)
    if x.shape[1] == fused.channels and (
        x.numel() < PAD_FROM_VALUES or not any(width % MULTIPLE for width in widths)
    ):
        return fused, x
    fused = fused._replace(padded=True)
    if not fused.blocks[0].residual:
        return fused, crop_map(x, fused.channels)
    missing = -x.shape[1] % MULTIPLE
    return fused, F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x


def crop_map(x: Tensor, channels: int) -> Tensor:
    """Return the first `channels` channels of a map as a dense tensor."""
    return x if x.shape[1] == channels else tiles.dense(x[:, :channels])


def padded_shapes(blocks: Sequence[Block], tensors: Sequence[Any]) -> dict[int, tuple[int, ...]]:
    """Return the padded shape of each tensor of the blocks, keyed by the tensor's index."""
    shapes: dict[int, tuple[int, ...]] = {}
    for conv, epilogue in (layer for block in blocks for layer in block.layers):
        of_output, of_input, *size = tensors[conv.weight].shape
        width = padded_width(of_output)
        is_stem = not (blocks[0].residual or shapes)
        shapes[conv.weight] = (width, of_input if is_stem else padded_width(of_input), *size)
        for index in epilogue.of_channels():
            if index is not None:
                shapes[index] = (*tensors[index].shape[:-1], width)
        if epilogue.se is not None:
            fc1_weight, _, fc2_weight, fc2_bias = epilogue.se
            reduced = tensors[fc1_weight].shape[0]
            shapes[fc1_weight] = reduced, width, 1, 1
            shapes[fc2_weight] = width, reduced, 1, 1
            shapes[fc2_bias] = (width,)
    return shapes


def cast_and_pad(
    fused: FusedBlocks, blocks: Sequence[Block], tensors: Sequence[Any]
) -> Sequence[Any]:
    """Return the tensors of the blocks, with copies in place of tensors to be cast or padded.

    Weights of convolutions become channels_last tensors of the dtype of `fused`.
    """
    specs: dict[int, CopySpec] = {
        index: (fused.dtype, tensors[index].shape)
        for index in fused.weights
        if tensors[index].dtype is not fused.dtype
        or not tensors[index].is_contiguous(memory_format=torch.channels_last)
    }
    if fused.padded:
        for index, shape in padded_shapes(blocks, tensors).items():
            if shape != tensors[index].shape:
                own = fused.dtype if index in fused.weights else tensors[index].dtype
                specs[index] = own, shape
    if not specs:
        return tensors
    copies: Any = _CastAndPad.apply([*specs.values()], *[tensors[index] for index in specs])
    copied = dict(zip(specs, copies, strict=True))
    return [copied.get(index, tensor) for index, tensor in enumerate(tensors)]


class _CastAndPad(torch.autograd.Function):
    """Copies of parameters, cast and padded; backward casts and crops their gradients."""

    @staticmethod
    def forward(ctx: Any, specs: list[CopySpec], *parameters: Tensor) -> Any:
        # save no parameters, because backward does not need their values
        ctx.layouts = [(p.shape, _strides(p), p.dtype) for p in parameters]
        copies = _allocate(specs, parameters)
        pairs = zip(copies, parameters, strict=True)
        copy_all([_cropped(copy, p.shape) for copy, p in pairs], parameters)
        frozen = zip(copies, ctx.needs_input_grad[1:], strict=True)
        ctx.mark_non_differentiable(*[copy for copy, needs_grad in frozen if not needs_grad])
        ctx.set_materialize_grads(False)
        return tuple(copies)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Any, ...]:
        gradients: list[Any] = [
            None if g is None else torch.empty_strided(shape, stride, dtype=dtype, device=g.device)
            for g, (shape, stride, dtype) in zip(grads, ctx.layouts, strict=True)
        ]
        targets = [f for f in gradients if f is not None]
        sources = [
            _cropped(g, f.shape) for f, g in zip(gradients, grads, strict=True) if g is not None
        ]
        copy_all(targets, sources)
        return None, *gradients


def _allocate(specs: Sequence[CopySpec], like: Sequence[Tensor]) -> list[Tensor]:
    """Allocate a tensor for each spec; padded tensors of a dtype are slices of one zero buffer."""
    copies: list[Any] = [None] * len(specs)
    wide: dict[torch.dtype, list[int]] = {}
    for index, ((dtype, shape), tensor) in enumerate(zip(specs, like, strict=True)):
        if shape == tensor.shape:
            copies[index] = torch.empty_like(tensor, dtype=dtype, memory_format=torch.channels_last)
        else:
            wide.setdefault(dtype, []).append(index)
    for dtype, indices in wide.items():
        sizes = [math.prod(specs[index][1]) for index in indices]
        buffer = like[0].new_zeros(sum(sizes), dtype=dtype)
        for index, piece in zip(indices, buffer.split(sizes), strict=True):
            shape = specs[index][1]
            if len(shape) == 4:
                copies[index] = piece.view(shape[0], *shape[2:], shape[1]).movedim(3, 1)
            else:
                copies[index] = piece.view(shape)
    return copies


def _strides(x: Tensor) -> tuple[int, ...]:
    return x.stride() if 0 not in x.stride() else x.contiguous().stride()  # 0 if x was expanded


def _cropped(wide: Tensor, shape: Sequence[int]) -> Tensor:
    return wide if wide.shape == shape else wide[tuple(map(slice, shape))]


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, by one `_foreach_copy_` for each dtype if possible.

    On a GPU, `_foreach_copy_` launches a single kernel only if each target has its source's
    strides. Strides of dimensions with one element have no effect, and are made equal.
    """
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        stride = target.stride()
        if source.stride() != stride:
            sizes = zip(target.shape, stride, source.stride(), strict=True)
            if any(size > 1 and own != other for size, own, other in sizes):
                target.copy_(source)
                continue
            source = source.as_strided(source.shape, stride)
        group = groups.setdefault((target.dtype, source.dtype), ([], []))
        group[0].append(target)
        group[1].append(source)
    for group in groups.values():
        torch._foreach_copy_(*group)
