"""Runs fused blocks on a map: around `StageFunction`, all that reads modules or random numbers.

Norms in eval mode get the statistics that they use from here, and the others' running statistics
are updated here.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tresnet.fused.block_specs import Block, EvalNorm, FusedBlocks
from tresnet.fused.cast_and_pad import cast_and_pad
from tresnet.fused.stage import Options, StageFunction, forward_block
from tresnet.layers.norm import ABN, running_stats_frozen
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
        tensors = cast_and_pad(fused, blocks, tensors)
        frozen = count_frozen(blocks, tensors, x)
        for block in blocks[:frozen]:
            x = forward_block(block, x, tensors, options, stats, None)
        if rest := blocks[frozen:]:
            if frozen:
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


@torch.no_grad()
def eval_stats(norms: Sequence[EvalNorm], tensors: Sequence[Any]) -> list[Tensor]:
    """Return `Epilogue.stats` (4, C) of each norm in eval mode, by multi-tensor operations."""
    if not norms:
        return []
    gammas = [tensors[norm.gamma] for norm in norms]
    modules = [norm.module for norm in norms]
    wide = torch.float64 if gammas[0].dtype == torch.float64 else torch.float32
    sizes = [len(gamma) for gamma in gammas]
    gamma = torch.cat(gammas).to(wide)
    mean = torch.cat([module.running_mean for module in modules]).to(wide)
    var = torch.cat([module.running_var for module in modules]).to(wide)
    shifted = torch._foreach_add(var.split(sizes), [module.eps for module in modules])
    invstd = torch.cat(shifted).rsqrt_()
    rows = zip(*(t.split(sizes) for t in (mean, gamma * invstd, invstd, var)), strict=True)
    stats = torch.cat([part for of_norm in rows for part in of_norm])
    return [part.view(4, -1) for part in stats.split([4 * size for size in sizes])]


@torch.no_grad()
def update_running_stats(norms: Sequence[ABN], stats: Sequence[Tensor]) -> None:
    """Update running statistics from batch statistics (4, C), by multi-tensor operations.

    Norms with `track_running_stats=False`, and norms within `FrozenRunningStats`, stay unchanged.
    """
    if running_stats_frozen():
        return
    groups: dict[Any, tuple[list[Tensor], list[Tensor], list[Tensor]]] = {}
    for norm, of_batch in zip(norms, stats, strict=True):
        own = norm.__dict__
        if own["track_running_stats"]:
            buffers = own["_buffers"]
            mean, var = buffers["running_mean"], buffers["running_var"]
            if of_batch.shape[1] != mean.shape[0]:
                of_batch = of_batch[:, : mean.shape[0]]
            running, new, counters = groups.setdefault((own["momentum"], mean.dtype), ([], [], []))
            running += mean, var
            new += of_batch.select(0, 0), of_batch.select(0, 3)
            counters.append(buffers["num_batches_tracked"])
    for (momentum, dtype), (running, new, counters) in groups.items():
        if new[0].dtype == dtype:
            torch._foreach_lerp_(running, new, momentum)
        else:
            wide = torch.promote_types(new[0].dtype, dtype)  # a variance may overflow float16
            values = [part.to(wide) for part in running]
            torch._foreach_lerp_(values, [part.to(wide) for part in new], momentum)
            torch._foreach_copy_(running, values)
        torch._foreach_add_(counters, 1)
