"""Division of a model's stem and stages into groups, which kernels or plain modules run."""

import functools
import warnings
from collections.abc import Container, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

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
from tresnet.models.tresnet import Part, Segment, checkpointed
from tresnet.ops import epilogue
from tresnet.ops.autocast import maps_dtype
from tresnet.ops.dispatch import obstacle, traced
from tresnet.ops.stem import stem_input
from tresnet.ops.unit_floats import unit_floats
from tresnet.settings import Impl, Recompute

UNREAD = SpaceToDepth, nn.Identity  # these run as plain modules, without a warning
# Reasons why plain modules run a part in place of kernels; `implementation` reads them.
_refusals = WeakKeyDictionary[nn.Module, str]()


class Group(NamedTuple):
    """Parts that run one after another: by fused kernels, or as plain modules if `fused` is None.

    A part that checkpoints is a group alone.
    """

    parts: list[Part]
    fused: FusedBlocks | None

    @property
    def name(self) -> str:
        """Name of the output."""
        return self.parts[-1].name

    def run_plainly(self, maps: list[Tensor]) -> Tensor:
        for part in self.parts:
            maps.append(part.run(maps))
        return maps.pop()


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
        self, parts: Sequence[Part], x: Tensor, wanted: Container[str]
    ) -> list[Segment] | None:
        """Return segments that run the parts of a model's body on `x`, or None for plain modules.

        `x` is (N, C, H, W), floats or uint8 images. Outputs whose names are in `wanted` have no
        padded channels. If one module has a norm that is never fused, such as
        `torch.nn.SyncBatchNorm`, all modules run as plain modules.
        """
        weight = next((p for part in parts for p in part.module.parameters()), None)
        ops = None if weight is None else self.ops(x, weight)
        try:
            groups = [] if ops is None else self._read(parts, x, wanted)
        except UnfusedNorm:
            groups = []
        dtype = next((group.fused.dtype for group in groups if group.fused is not None), None)
        if dtype is None:
            return None
        segments = list[Segment]()
        if x.dtype == torch.uint8:
            segments, groups = self._as_floats(x, groups, wanted, dtype)
        options = Options(ops, self.recompute != "none")
        padded = [False, *(_passes_padding(*pair, wanted) for pair in pairwise(groups))]
        for group, takes, leaves in zip(groups, padded, [*padded[1:], False], strict=True):
            run: Any = group.run_plainly
            if group.fused is not None:
                run = functools.partial(self._run, group, group.fused, options, takes, leaves)
            segments.append((group.name, run))
        return segments

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

    def _read(self, parts: Sequence[Part], x: Tensor, wanted: Container[str]) -> list[Group]:
        """Divide parts into groups, each of which is fused or runs as plain modules.

        The stem's convolution joins the first stage, unless its output is wanted.
        """
        groups, waiting = list[Group](), list[Part]()
        for part in parts:
            if part.checkpoints:
                groups += self._groups(waiting, x)
                waiting = []
            waiting.append(part)
            ends = not isinstance(part.module, ConvNormAct | FoldedConv)
            if part.checkpoints or part.name in wanted or ends:
                groups += self._groups(waiting, x)
                waiting = []
        return groups + self._groups(waiting, x)

    def _groups(self, parts: list[Part], x: Tensor) -> list[Group]:
        if len(parts) <= 1 and all(isinstance(part.module, UNREAD) for part in parts):
            return [Group([part], None) for part in parts]
        try:
            return [Group(parts, read([part.module for part in parts], x))]
        except UnfusedNorm:
            raise
        except Unsupported as reason:
            if len(parts) > 1:
                return [group for part in parts for group in self._groups([part], x)]
            self._refuse(parts, reason)
            return [Group(parts, None)]

    def _as_floats(
        self, x: Tensor, groups: list[Group], wanted: Container[str], dtype: torch.dtype
    ) -> tuple[list[Segment], list[Group]]:
        """Return a segment that divides uint8 images by 255, and the groups left to run.

        A kernel divides and runs an unchanged `SpaceToDepth` in one pass.
        """
        part = groups[0].parts[0]
        if type(part.module) is SpaceToDepth and part.name not in wanted:
            with suppress(Unsupported):
                check_modules([part.module])
                size = part.module.block_size
                reason = first_use.stem_failure(x, size, dtype)
                if reason is None:
                    stem = functools.partial(stem_input, block_size=size, dtype=dtype, kernels=True)
                    return [(part.name, lambda maps: stem(maps.pop()))], groups[1:]
                self._refuse([part], reason)
        return [("", lambda maps: unit_floats(maps.pop(), dtype=dtype))], groups

    def _run(
        self,
        group: Group,
        fused: FusedBlocks,
        options: Options,
        takes_padding: bool,
        leaves_padding: bool,
        maps: list[Tensor],
    ) -> Tensor:
        """Run a group on the map popped from `maps`, by kernels unless they cannot run on it.

        The map may have padded channels if `takes_padding`, and the result if `leaves_padding`.
        """
        entered = self._entered(group, fused, options, takes_padding, maps)
        if entered is None:
            y = group.run_plainly(maps)
        elif group.parts[0].checkpoints:
            y = checkpointed(lambda x: run_fused(entered, options, [x]), maps.pop())
        else:
            y = run_fused(entered, options, maps)
        return y if leaves_padding else crop_map(y, fused.out_channels)

    def _entered(
        self, group: Group, fused: FusedBlocks, options: Options, padded: bool, maps: list[Tensor]
    ) -> FusedBlocks | None:
        """Prepare the map in `maps` for a group's kernels; return None if plain modules run."""
        if not padded and maps[0].shape[1] != fused.channels:
            return None
        entered, x = enter(fused, maps[0])
        tensors = (tensor for tensor in (x, *entered.tensors) if tensor is not None)
        trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if fused.folded and trains:
            reason = "folded norms have no gradients in the fused kernels"
        else:
            reason = first_use.failure(entered, x, options, trains)
        if reason is not None:
            self._refuse(group.parts, reason)
            maps[0] = crop_map(maps[0], fused.channels)
            return None
        for part in group.parts:
            _refusals.pop(part.module, None)
        maps[0] = x
        return entered

    def _refuse(self, parts: Sequence[Part], reason: object) -> None:
        """Warn that plain modules run; raise `InputError` instead with `impl` 'triton'."""
        name = parts[-1].name
        if self.impl == "triton":
            raise InputError(f"impl='triton' cannot run {name}: {reason}; use 'auto'") from None
        _refusals.update((part.module, str(reason)) for part in parts)
        warnings.warn(f"{name} runs as plain modules: {reason}", stacklevel=5)


def _passes_padding(before: Group, after: Group, wanted: Container[str]) -> bool:
    """Return whether padded channels of a map may stay between two groups."""
    if before.fused is None or after.fused is None or before.name in wanted:
        return False
    return before.fused.out_channels == after.fused.channels


def implementation(model: nn.Module, device: torch.device, dtype: torch.dtype) -> str:
    """Return 'Triton kernels', or 'plain modules' with the reason, for a device and dtype of maps.

    This function runs no model. The parts that 'auto' has run as plain modules, because a module is
    unsupported or kernels failed their check, are named if the model has run before.
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
    if reason is not None:
        return f"plain modules, because impl='triton' {reason}"
    refused = [f"{name} ({_refusals[m]})" for name, m in model.named_modules() if m in _refusals]
    return ", but plain modules for ".join(["Triton kernels", *filter(None, [", ".join(refused)])])
