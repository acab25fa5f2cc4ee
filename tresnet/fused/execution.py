"""Runs fused blocks on a map: around `StageFunction`, all that reads modules or random numbers."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tresnet.fused.block_specs import Block, FusedBlocks
from tresnet.fused.cast_and_pad import cast_and_pad
from tresnet.fused.running_stats import eval_stats, update_running_stats
from tresnet.fused.stage import Options, StageFunction, forward_block
from tresnet.ops.autocast import autocast_off


def run_fused(fused: FusedBlocks, options: Options, maps: list[Tensor]) -> Tensor:
    """Run fused blocks on the map popped from `maps`, and update running statistics.

    `cast_and_pad.enter` prepared the map. The result may have padded channels too.
    """
    x = maps.pop()  # so that no caller's reference keeps it in memory
    stats = list[Tensor]()
    with autocast_off(x.device.type):
        blocks, tensors = draw_drop_path(fused.blocks, list(fused.tensors), x)
        for norm, of_norm in zip(
            fused.eval_norms, eval_stats(fused.eval_norms, tensors), strict=True
        ):
            tensors[norm.stats] = of_norm
        tensors = cast_and_pad(fused, blocks, tensors, x.shape[1])
        frozen = count_frozen(blocks, tensors, x)
        for block in blocks[:frozen]:
            x = forward_block(block, x, tensors, options, stats, None)
        if rest := blocks[frozen:]:
            used = {index for block in rest for index in block.indices()}
            tensors = [t if index in used else None for index, t in enumerate(tensors)]
            x, *of_rest = cast(Any, StageFunction.apply(rest, options, x, *tensors))
            stats += of_rest
        update_running_stats(fused.batch_norms, stats)
    return x


def count_frozen(blocks: Sequence[Block], tensors: Sequence[Any], x: Tensor) -> int:
    """Return the number of blocks before the first gradient; they save nothing for backward."""
    if not torch.is_grad_enabled():
        return len(blocks)
    if x.requires_grad:
        return 0
    trained = (any(tensors[index].requires_grad for index in block.indices()) for block in blocks)
    return next((number for number, trains in enumerate(trained) if trains), len(blocks))


def draw_drop_path(
    blocks: Sequence[Block], tensors: list[Any], x: Tensor
) -> tuple[list[Block], list[Any]]:
    """Draw the factor of stochastic depth for each sample of `x`, as timm's `DropPath` does."""
    drawn = list[Block]()
    for block in blocks:
        if block.drop_path is not None:
            rate, scale_by_keep = block.drop_path
            factors = x.new_empty(len(x), 1).bernoulli_(1 - rate)
            factors = factors if x.dtype == torch.float64 else factors.float()
            if scale_by_keep and rate < 1:
                factors /= 1 - rate
            block = block._replace(drop_path_scale=len(tensors))
            tensors.append(factors)
        drawn.append(block)
    return drawn, tensors
