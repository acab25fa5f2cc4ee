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
from tresnet.fused import first_use
from tresnet.fused.block_specs import FusedBlocks
from tresnet.fused.cast_and_pad import crop_map, enter
from tresnet.fused.execution import run_fused
from tresnet.fused.module_reader import (
    TENSORS,
    UNFUSED_NORMS,
    UnfusedNorm,
    Unsupported,
    check_modules,
    read,
)
from tresnet.fused.stage import Options
from tresnet.layers.conv_norm_act import ConvNormAct
from tresnet.layers.folded_conv import FoldedConv
from tresnet.layers.space_to_depth import SpaceToDepth
from tresnet.models.tresnet import Child, checkpointed, repeated_parts, run_children
from tresnet.ops import epilogue
from tresnet.ops.autocast import maps_dtype
from tresnet.ops.dispatch import obstacle, traced
from tresnet.ops.stem import stem_input
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

    def run_plainly(self, maps: list[Tensor]) -> Tensor:
        x = maps.pop()
        for module in self.modules:
            x = module(x)
        return x


class Runner(NamedTuple):
    """Callable that a TResNet holds as its attribute `runner`, to run the stem and the stages.

    With `impl` 'auto', fused Triton kernels run on a GPU that supports them, and otherwise plain
    PyTorch modules. With 'triton', `InputError` is raised where the kernels cannot run. With
    'plain', plain modules run. With `recompute` 'activations', backward recomputes the outputs of
    norms, blurs and SEs from the outputs of convolutions. With 'none', forward saves these outputs.
    Backward always computes a shortcut's pool again.
    """

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
        ops = None if weight is None else self.ops(x, weight)
        try:
            groups = [] if ops is None else self._read(children, x, wanted, checkpoints)
        except UnfusedNorm:
            groups = []
        dtype = next((group.fused.dtype for group in groups if group.fused is not None), None)
        if dtype is None:
            return run_children(children, x, wanted, checkpoints)
        options = Options(ops, self.recompute != "none")
        if x.dtype == torch.uint8:
            x, groups = self._as_floats(x, groups, wanted, dtype)
        outputs: dict[str, Tensor] = {}
        maps, channels = [x], x.shape[1]  # a list, so that a group can pop and free its input
        del x
        for group in groups:
            fused = self._entered(group, maps, channels, options)
            if fused is None:
                maps[0] = crop_map(maps[0], channels)
                run: Any = group.run_plainly
            else:
                run = functools.partial(run_fused, fused, options)
            if group.checkpoints:
                maps.append(checkpointed(lambda x, run=run: run([x]), maps.pop()))
            else:
                maps.append(run(maps))
            channels = maps[0].shape[1] if fused is None else fused.out_channels
            if group.name in wanted:  # cropped for later groups too: its hooks see all gradients
                outputs[group.name] = maps[0] = crop_map(maps[0], channels)
        return outputs

    def ops(self, x: Any, weight: Tensor) -> Any:
        """Return the module `tresnet.ops.epilogue`, or None if its kernels cannot run on `x`."""
        # a level of 0 or more means forward-mode derivatives, which kernels do not compute
        if self.impl == "plain" or type(x) not in TENSORS or forward_ad._current_level >= 0:
            return None
        if traced() or x.numel() == 0 or (self.impl == "auto" and not x.is_cuda):
            return None
        reason = obstacle(x.device, maps_dtype(x, weight), isinstance(x, FakeTensor))
        if reason is not None and self.impl == "triton":
            raise InputError(f"impl='triton' {reason}: use impl='auto'")
        return epilogue if reason is None else None

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
            return [Group(name, modules, read(modules, x))]
        except UnfusedNorm:
            raise
        except Unsupported as reason:
            if len(parts) > 1:
                return [group for part in parts for group in self._groups([part], x)]
            self._refuse(name, reason)
            return [Group(name, modules, None)]

    def _as_floats(
        self, x: Tensor, groups: list[Group], wanted: Container[str], dtype: torch.dtype
    ) -> tuple[Tensor, list[Group]]:
        """Divide uint8 images by 255; return floats in `dtype`, and the groups left to run.

        A kernel divides and runs an unchanged `SpaceToDepth` in one pass.
        """
        name, (module, *_) = groups[0][:2]
        if type(module) is SpaceToDepth and name not in wanted:
            with suppress(Unsupported):
                check_modules([module])
                reason = first_use.stem_failure(x, module.block_size, dtype)
                if reason is None:
                    return stem_input(x, module.block_size, dtype, kernels=True), groups[1:]
                self._refuse(name, reason)
        return unit_floats(x, dtype=dtype), groups

    def _entered(
        self, group: Group, maps: list[Tensor], channels: int, options: Options
    ) -> FusedBlocks | None:
        """Prepare the map in `maps` for a group's kernels; return None if plain modules run.

        The map has `channels` channels, without padding.
        """
        if group.fused is None or channels != group.fused.channels:
            return None
        fused, x = enter(group.fused, maps[0])
        tensors = (tensor for tensor in (x, *fused.tensors) if tensor is not None)
        trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if fused.folded and trains:
            reason = "folded norms have no gradients in the fused kernels"
        else:
            reason = first_use.failure(fused, x, options, trains)
        if reason is not None:
            self._refuse(group.name, reason)
            return None
        maps[0] = x
        return fused

    def _refuse(self, name: str, reason: object) -> None:
        """Warn that plain modules run; raise `InputError` instead with `impl` 'triton'."""
        if self.impl == "triton":
            raise InputError(f"impl='triton' cannot run {name}: {reason}; use 'auto'") from None
        warnings.warn(f"{name} runs as plain modules: {reason}", stacklevel=5)


def implementation(model: nn.Module, device: torch.device, dtype: torch.dtype) -> str:
    """Return 'Triton kernels', or 'plain modules' with the reason, for a device and dtype of maps.

    This function runs no model. If a module is unsupported, or the kernels fail their check when
    the model runs, 'auto' runs plain modules after all, with a warning.
    """
    runner = getattr(model, "runner", None)
    if not isinstance(runner, Runner) or runner.impl == "plain":
        return "plain modules"
    other = next((type(m).__name__ for m in model.modules() if type(m) in UNFUSED_NORMS), None)
    if other is not None:
        return f"plain modules, because the norms are {other}"
    if runner.impl == "auto" and device.type != "cuda":
        return f"plain modules, because impl='auto' runs no kernels on {device.type}"
    reason = obstacle(device, dtype)
    return "Triton kernels" if reason is None else f"plain modules, because impl='triton' {reason}"
