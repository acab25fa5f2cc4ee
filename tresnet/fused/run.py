"""Division of a model's stem and stages into groups, which kernels or plain modules run."""

import functools
import warnings
from collections.abc import Container, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from tresnet.errors import InputError
from tresnet.fused import prepare
from tresnet.fused.blocks import Block, FusedBlocks
from tresnet.fused.read import TENSORS, UnfusedNorm, Unsupported, check_modules, read
from tresnet.fused.stage import Options, run_blocks
from tresnet.layers.conv_norm_act import ConvNormAct
from tresnet.layers.folded_conv import FoldedConv
from tresnet.layers.norm import ABN, running_stats_frozen
from tresnet.layers.space_to_depth import SpaceToDepth
from tresnet.models.tresnet import Child, checkpointed, repeated_parts, run_children
from tresnet.ops import abn, tiles
from tresnet.ops.abn import reference
from tresnet.ops.autocast import autocast_off, maps_dtype
from tresnet.ops.dispatch import obstacle, traced
from tresnet.ops.space_to_depth import stem_input
from tresnet.ops.unit_floats import unit_floats
from tresnet.settings import Impl, Recompute


class Group(NamedTuple):
    """Modules that run one after another: by fused kernels, or as plain modules if `fused` is None.

    `name` is the name of the output. With `checkpoints`, only the input is saved for backward.
    """

    name: str
    modules: list[nn.Module]
    fused: FusedBlocks | None
    checkpoints: bool = False


class UncheckedRunner(NamedTuple):
    """`tresnet.fused.Runner` without the check of the kernels before their first use."""

    impl: Impl = "auto"
    recompute: Recompute = "activations"

    def __call__(
        self,
        children: Sequence[Child],
        x: Tensor,
        wanted: Container[str],
        checkpoints: bool = False,
    ) -> dict[str, Tensor]:
        """Run named modules of a model's body in order; return outputs whose names are in `wanted`.

        `x` is (N, C, H, W), floats or uint8 images. With `checkpoints`, only the input of each
        block of a stage is saved for backward. If one module has a norm that is never fused, such
        as `torch.nn.SyncBatchNorm`, all modules run as plain modules.
        """
        weight = next((p for _, child in children for p in child.parameters()), None)
        if weight is None or (ops := self.ops(x, weight)) is None:
            return run_children(children, x, wanted, checkpoints)
        try:
            groups = self._read(children, x, wanted, checkpoints)
        except UnfusedNorm:
            groups = []
        if all(group.fused is None for group in groups):
            return run_children(children, x, wanted, checkpoints)
        if x.is_cuda and (reason := self.failure(children, groups, x)) is not None:
            if self.impl == "triton":
                raise InputError(f"impl='triton' {reason}: use impl='auto'")
            return run_children(children, x, wanted, checkpoints)
        return run_groups(groups, x, wanted, Options(ops, self.recompute != "none"))

    def ops(self, x: Any, weight: Tensor) -> Any:
        """Return the module `tresnet.ops.abn`, or None if its kernels cannot run on `x`."""
        if not self.applies(x):
            return None
        reason = obstacle(x.device, maps_dtype(x, weight), isinstance(x, FakeTensor))
        if reason is not None and self.impl == "triton":
            raise InputError(f"impl='triton' {reason}: use impl='auto'")
        return abn if reason is None else None

    def failure(self, children: Sequence[Child], groups: Sequence[Group], x: Tensor) -> str | None:
        """Return the reason why the kernels for `children` must not run; here always None."""
        return None

    def applies(self, x: Any) -> bool:
        """Return whether `impl`, the class of `x`, and active transforms allow fused kernels."""
        # a level of 0 or more means forward-mode derivatives, which kernels do not compute
        if self.impl == "plain" or type(x) not in TENSORS or forward_ad._current_level >= 0:
            return False
        return not traced() and x.numel() > 0 and (self.impl == "triton" or x.is_cuda)

    def _read(
        self, children: Sequence[Child], x: Tensor, wanted: Container[str], checkpoints: bool
    ) -> list[Group]:
        """Divide children into groups, each of which is fused or runs as plain modules.

        Without `checkpoints`, the stem and the first stage are one group, unless the stem's output
        is wanted. With `checkpoints`, each block of a stage is a group.
        """
        groups = list[Group]()
        waiting: list[Child] = []
        for name, child in children:
            repeated = repeated_parts(child) if checkpoints else []
            if repeated or isinstance(child, SpaceToDepth | nn.Identity):
                groups += self._groups(waiting, x)
                waiting = []
            if repeated:
                for index, part in enumerate(repeated):
                    (group,) = self._groups([(f"{name}.{index}", part)], x)
                    groups.append(group._replace(checkpoints=True))
                groups[-1] = groups[-1]._replace(name=name)
            elif isinstance(child, SpaceToDepth | nn.Identity):
                groups.append(Group(name, [child], None))
            else:
                waiting.append((name, child))
                if name in wanted or not isinstance(child, ConvNormAct | FoldedConv):
                    groups += self._groups(waiting, x)
                    waiting = []
        return groups + self._groups(waiting, x)

    def _groups(self, parts: list[Child], x: Tensor) -> list[Group]:
        if not parts:
            return []
        name, modules = parts[-1][0], [module for _, module in parts]
        try:
            fused = read(modules, x)
            if fused.folded and torch.is_grad_enabled() and (x.requires_grad or _trains(fused)):
                raise Unsupported("folded norms have no gradients in the fused kernels")
            return [Group(name, modules, fused)]
        except UnfusedNorm:
            raise
        except Unsupported as reason:
            if len(parts) > 1:
                return [group for part in parts for group in self._groups([part], x)]
            if self.impl == "triton":
                raise InputError(f"impl='triton' cannot run {name}: {reason}; use 'auto'") from None
            warnings.warn(f"{name} runs as plain modules: {reason}", stacklevel=5)
            return [Group(name, modules, None)]


def run_groups(
    groups: Sequence[Group], x: Tensor, wanted: Container[str], options: Options
) -> dict[str, Tensor]:
    """Run the groups in order; return the outputs named in `wanted`, without padded channels."""
    outputs: dict[str, Tensor] = {}
    dtype = next(group.fused.dtype for group in groups if group.fused is not None)
    maps, channels = [x], x.shape[1]  # a list, so that `run` can pop and free its input
    del x
    for name, modules, fused, checkpoints in groups:
        if fused is not None and channels == fused.channels:
            run: Any = functools.partial(_run_fused, fused, options)
            channels = fused.out_channels
        else:
            maps[0] = prepare.crop_map(maps[0], channels)
            run = functools.partial(_run_modules, modules, dtype, options.ops)
            channels = 0
        if checkpoints:
            maps.append(checkpointed(lambda x, run=run: run([x]), maps.pop()))
        else:
            maps.append(run(maps))
        channels = channels or maps[0].shape[1]
        if name in wanted:  # later groups read this tensor, so that its hooks see all gradients
            outputs[name] = maps[0] = prepare.crop_map(maps[0], channels)
    return outputs


def _run_modules(
    modules: Sequence[nn.Module], dtype: torch.dtype, ops: Any, maps: list[Tensor]
) -> Tensor:
    x = maps.pop()
    for module in modules:
        x = _call(module, x, dtype, ops)
    return x


def _call(module: nn.Module, x: Tensor, dtype: torch.dtype, ops: Any) -> Tensor:
    """Call a module; divide uint8 images by 255 before it, or in the kernel of `SpaceToDepth`."""
    if x.dtype != torch.uint8:
        return module(x)
    if type(module) is SpaceToDepth:
        with suppress(Unsupported):
            check_modules([module])
            return stem_input(x, module.block_size, dtype, kernels=ops is not reference)
    return module(unit_floats(x, dtype=dtype))


def _run_fused(fused: FusedBlocks, options: Options, maps: list[Tensor]) -> Tensor:
    """Run fused blocks on the map popped from `maps`; the returned map may be padded."""
    x = maps.pop()
    x = unit_floats(x, dtype=fused.dtype) if x.dtype == torch.uint8 else x.to(fused.dtype)
    x = tiles.dense(x)
    channels = None
    if prepare.pads((fused.tensors[index].shape[0] for index in fused.weights), x, fused.channels):
        x = prepare.pad_map(x) if fused.blocks[0].residual else x
        channels = x.shape[1]
    blocks, tensors = draw_drop_path(fused.blocks, list(fused.tensors), x)
    with autocast_off(x.device.type):
        for (index, _), stats in zip(fused.eval_norms, eval_stats(fused.eval_norms), strict=True):
            tensors[index] = stats
        tensors = prepare.cast_and_pad(blocks, tensors, fused.weights, fused.dtype, channels)
        maps.append(x)
        del x
        batch_stats = run_blocks(blocks, tensors, maps, options)
        update_running_stats(fused.batch_norms, batch_stats)
    return maps.pop()


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
def eval_stats(norms: Sequence[tuple[int, ABN]]) -> list[Tensor]:
    """Return `Norm.stats` (4, C) of each norm in eval mode, by multi-tensor operations."""
    if not norms:
        return []
    every = [norm for _, norm in norms]
    wide = torch.float64 if every[0].weight.dtype == torch.float64 else torch.float32
    sizes = [len(norm.weight) for norm in every]
    gamma = torch.cat([norm.weight for norm in every]).to(wide)
    mean = torch.cat([norm.running_mean for norm in every]).to(wide)
    var = torch.cat([norm.running_var for norm in every]).to(wide)
    shifted = torch._foreach_add(var.split(sizes), [norm.eps for norm in every])
    invstd = torch.cat(shifted).rsqrt_()
    rows = zip(*(t.split(sizes) for t in (mean, gamma * invstd, invstd, var)), strict=True)
    stats = torch.cat([part for of_norm in rows for part in of_norm])
    return [part.view(4, -1) for part in stats.split([4 * size for size in sizes])]


def _trains(fused: FusedBlocks) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in fused.tensors)


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
