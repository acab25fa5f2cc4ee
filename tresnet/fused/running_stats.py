"""Statistics of batch norms: those that norms in eval mode use, and updates of running ones."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tresnet.fused.block_specs import EvalNorm
from tresnet.layers.norm import ABN, running_stats_frozen


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
    groups: dict[Any, list[tuple[Tensor, ...]]] = {}
    if running_stats_frozen():
        return
    for norm, of_batch in zip(norms, stats, strict=True):
        own = norm.__dict__
        if own["track_running_stats"]:
            buffers = own["_buffers"]
            mean, var = buffers["running_mean"], buffers["running_var"]
            if of_batch.shape[1] != mean.shape[0]:
                of_batch = of_batch[:, : mean.shape[0]]
            members = groups.setdefault((own["momentum"], mean.dtype, var.dtype), [])
            news = of_batch.select(0, 0), of_batch.select(0, 3)
            members.append((mean, var, *news, buffers["num_batches_tracked"]))
    for (momentum, *dtypes), members in groups.items():
        means, variances, new_means, new_variances, counters = map(list, zip(*members, strict=True))
        for running, new, dtype in zip(
            (means, variances), (new_means, new_variances), dtypes, strict=True
        ):
            if (wide := new[0].dtype) == dtype:
                torch._foreach_lerp_(running, new, momentum)
                continue
            wide = torch.promote_types(wide, dtype)  # a variance may overflow float16
            values = [part.to(wide) for part in running]
            torch._foreach_lerp_(values, [part.to(wide) for part in new], momentum)
            torch._foreach_copy_(running, values)
        torch._foreach_add_(counters, 1)
