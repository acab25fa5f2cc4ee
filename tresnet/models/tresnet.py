"""TResNet (arXiv 2003.13630): stem, four stages, head, and timm's model interface.

The model consists of ordinary PyTorch modules. If the attribute `runner` is set, it may replace the
modules of the stem and the stages by segments. `tresnet.create` sets a `tresnet.fused.Runner`,
whose segments use Triton kernels. timm's scripts call most of the methods that follow `forward`.
"""

import operator
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from tresnet.errors import InputError
from tresnet.layers.conv_norm_act import ConvNormAct
from tresnet.layers.folded_conv import FoldedConv
from tresnet.layers.grouped_linear import GroupedLinear
from tresnet.layers.hooks import find_hooks
from tresnet.layers.norm import FrozenRunningStats, NormAct
from tresnet.layers.space_to_depth import SpaceToDepth
from tresnet.layers.symbolic import symbolic
from tresnet.models.blocks import BasicBlock, BlockSettings, Bottleneck
from tresnet.models.heads import Head, build_head
from tresnet.ops.autocast import autocast_dtype
from tresnet.ops.stem import check_blocks
from tresnet.ops.unit_floats import unit_floats
from tresnet.settings.model import ModelConfig

if TYPE_CHECKING:
    from timm.models._features import FeatureGetterNet

STAGES = ("layer1", "layer2", "layer3", "layer4")

Child = tuple[str, nn.Module]
Segment = tuple[str, Callable[[list[Tensor]], Tensor]]  # pops its input from the list
Runner = Callable[[Sequence["Part"], Tensor, Container[str]], Sequence[Segment] | None]


class Part(NamedTuple):
    """Module that runs as a whole, and the name of its output.

    If `checkpoints`, only its input is saved, and backward runs its forward again.
    """

    name: str
    module: nn.Module
    checkpoints: bool = False

    def run(self, maps: list[Tensor]) -> Tensor:
        x = maps.pop()
        return checkpointed(self.module, x) if self.checkpoints else self.module(x)


def run_children(
    children: Iterable[Child],
    x: Tensor,
    wanted: Container[str],
    checkpoints: bool = False,
    runner: Runner | None = None,
) -> dict[str, Tensor]:
    """Run named modules one after another; return the outputs whose names are in `wanted`.

    `x` is (N, C, H, W); uint8 images are divided by 255 first. With `checkpoints`, only the input
    of each residual block is saved for backward. `runner` may return segments, which then run in
    place of the modules.
    """
    parts = [part for name, child in children for part in parts_of(name, child, checkpoints)]
    segments = None if runner is None else runner(parts, x, wanted)
    if segments is None:
        segments = [(part.name, part.run) for part in parts]
        if not symbolic(x) and x.dtype == torch.uint8:
            dtypes = (p.dtype for part in parts for p in part.module.parameters())
            x = unit_floats(x, dtype=next(dtypes, torch.float32))
    outputs, maps = {}, [x]  # a list, so that a segment can pop and free its input
    del x
    for name, run in segments:
        maps.append(run(maps))
        if name in wanted:
            outputs[name] = maps[0]
    return outputs


def parts_of(name: str, child: nn.Module, checkpoints: bool) -> list[Part]:
    """Divide a stage into its blocks if `checkpoints`; a stage with hooks stays whole."""
    if not (checkpoints and isinstance(child, nn.Sequential) and len(child)):
        return [Part(name, child)]
    if find_hooks([child]):
        return [Part(name, child, True)]
    names = [f"{name}.{index}" for index in range(len(child) - 1)] + [name]
    return [Part(*named, True) for named in zip(names, child, strict=True)]


def checkpointed(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Call `function`, saving only `x`; backward repeats the call, but updates no statistics."""
    from torch.utils.checkpoint import checkpoint

    options: dict[str, Any] = {"use_reentrant": False}
    if not torch.compiler.is_compiling():  # the compiler updates running statistics only once
        options["context_fn"] = lambda: (nullcontext(), FrozenRunningStats())
    return cast(Tensor, checkpoint(function, x, **options))


class TResNet(nn.Module):
    """Space-to-depth stem, four stages of residual blocks, and a classifier head.

    The input (N, in_chans, H, W) has uint8 values, which the model divides by 255, or floats in
    [0, 1]. Do not subtract means or divide by deviations. H and W must be multiples of the block
    size b, at least 5 b. On a GPU, channels_last is fastest. The output is logits (N, num_classes).
    """

    __jit_unused_properties__ = ("default_cfg", "head_hidden_size")
    __jit_ignored_attributes__ = ("runner",)
    pretrained_cfg: dict[str, Any]

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config = config.checked()
        self.num_classes = config.num_classes
        self.in_chans = config.in_chans
        self.drop_rate = config.drop_rate
        self.grad_checkpointing = False
        self.runner: Runner | None = None
        self.pretrained_cfg = {}
        self.body = self._make_body(device=device, dtype=dtype)
        self.num_features: int = self.feature_info[-1]["num_chs"]
        self.head: Head = build_head(self.num_features, config, device=device, dtype=dtype)
        for module in self.body.modules():
            # no init on meta: kaiming_normal_ would import torch._dynamo, which takes 1.8 s
            if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="leaky_relu")

    def _make_body(self, **factory_kwargs: Any) -> nn.Sequential:
        config, channels, block_size = self.config, self.config.planes, self.config.block_size
        settings = BlockSettings(config.norm, config.block_slope, config.jit, **factory_kwargs)
        stem = replace(settings, slope=config.stem_slope)
        parts: dict[str, nn.Module] = {
            "s2d": SpaceToDepth(block_size, config.jit),
            "conv1": stem.conv(config.in_chans * block_size**2, channels, 3),
        }
        self.feature_info = [{"num_chs": channels, "reduction": block_size, "module": "body.conv1"}]
        last_block, blocks_before = max(sum(config.layers) - 1, 1), 0
        for index, (name, count) in enumerate(zip(STAGES, config.layers, strict=True)):
            block = Bottleneck if index >= 2 or config.bottlenecks else BasicBlock
            planes, blocks = config.planes << index, []
            for i in range(count):
                rate = config.drop_path_rate * (blocks_before + i) / last_block
                own = replace(settings, use_se=index < 3, drop_path_rate=rate)
                blocks.append(block(channels, planes, 2 if i == 0 and index > 0 else 1, own))
                channels = planes * block.expansion
            blocks_before += count
            parts[name] = nn.Sequential(*blocks)
            where = {"reduction": block_size << index, "module": f"body.{name}"}
            self.feature_info.append({"num_chs": channels, **where})
        return nn.Sequential(OrderedDict(parts))

    @torch.jit.ignore  # pyright: ignore[reportArgumentType]
    def check_input(self, x: Tensor) -> None:
        """Raise `InputError` unless `x` is a batch of images of a valid shape and dtype."""
        block, channels = self.config.block_size, self.config.in_chans
        if not isinstance(x, Tensor) or x.dim() != 4:
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise InputError(f"expected images (N, {channels}, H, W), got {got}")
        if x.shape[1] != channels:
            raise InputError(
                f"expected {channels} channels, got {x.shape[1]} in shape {tuple(x.shape)}: "
                f"convert the images, or build the model with in_chans={x.shape[1]}"
            )
        if not x.is_floating_point() and x.dtype != torch.uint8:
            raise InputError(
                f"expected floating-point images in [0, 1], or uint8 images, got {x.dtype}: "
                "convert with x.float() / 255, or x.to(torch.uint8)"
            )
        # `dtype` is None in replicas of `nn.DataParallel`, because they have no `nn.Parameter`
        dtype = next((p.dtype for p in self.body.parameters()), None)
        # autocast casts images and weights to one dtype, unless the images or weights are float64
        reconciled = autocast_dtype(x.device.type) and torch.float64 not in (x.dtype, dtype)
        if x.is_floating_point() and dtype not in (None, x.dtype) and not reconciled:
            raise InputError(
                f"expected images in {dtype}, as the weights are, got {x.dtype}: "
                f"convert with x.to({dtype})"
            )
        check_blocks(x, block)
        h, w = x.shape[-2:]
        if min(h, w) < 5 * block:
            raise InputError(
                f"expected height and width of at least {5 * block}, got ({h}, {w}): resize, "
                "or build the model with a smaller block_size"
            )

    @torch.jit.unused
    def _run_body(self, x: Tensor, wanted: Sequence[int]) -> list[Tensor]:
        """Run `body` up to child max(`wanted`); return the outputs at indices `wanted`."""
        if not (symbolic(x) or torch.compiler.is_exporting() or torch.jit.is_tracing()):
            self.check_input(x)
        children = list(self.body.named_children())[: max(wanted) + 1]
        names = [children[index][0] for index in wanted]
        checkpoints = self.grad_checkpointing and torch.is_grad_enabled()
        outputs = run_children(children, x, names, checkpoints, self.runner)
        return [outputs[name] for name in names]

    def forward_features(self, x: Tensor) -> Tensor:
        """Map images to (N, num_features, ceil(H / 8b), ceil(W / 8b)); b is the block size."""
        if torch.jit.is_scripting():
            return self.body(x)
        return self._run_body(x, [len(self.body) - 1])[0]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map a feature map to logits (N, num_classes), or to pooled features if `pre_logits`."""
        return self.head(x, pre_logits) if pre_logits else self.head(x)  # as timm, for any module

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, in_chans, H, W) to logits (N, num_classes)."""
        return self.head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Return feature maps of chosen stages; the interface is timm's.

        `indices` lists the maps to return: 0 is the stem's map, and 1 to 4 are the stages' maps.
        Negative indices count from the end. An int n means the last n maps; None means all maps.
        With `stop_early`, no stage after the highest index runs. The result is (last map that was
        computed, list of maps), or only the list if `intermediates_only`. `norm` has no effect.
        `InputError`: an index is out of range, or `output_fmt` is not 'NCHW'.
        """
        if output_fmt != "NCHW":
            raise InputError(f"expected output_fmt 'NCHW', got {output_fmt!r}")
        taken = take_indices(indices, len(self.body) - 1)
        last = max(taken) + 1 if stop_early else len(self.body) - 1
        *maps, x = self._run_body(x, [*(index + 1 for index in taken), last])
        return maps if intermediates_only else (x, maps)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove stages after the highest of `indices`; return the list of indices, none negative.

        For `indices`, see `forward_intermediates`. The head is removed if `prune_head`, or if a
        stage is removed. `prune_norm` has no effect.
        """
        taken = take_indices(indices, len(self.body) - 1)
        last = max(taken)
        shorter = last + 2 < len(self.body)
        self.body = self.body[: last + 2]
        self.num_features = self.feature_info[last]["num_chs"]
        if prune_head or shorter:
            self.reset_classifier(0, "")
        return taken

    def get_classifier(self) -> nn.Module:
        """Return `head.fc`, an `nn.Identity` for 0 classes, or the whole of another head."""
        return getattr(self.head, "fc", self.head)

    def reset_classifier(
        self,
        num_classes: int,
        global_pool: str | None = None,
        head_groups: int | Sequence[int] | None = None,
    ) -> None:
        """Replace the head by a new one of the same kind, or by a global pool for 0 classes.

        `global_pool` is the pooling before a linear classifier. If None, the pooling stays.
        For 'group_attention', `head_groups` is the number of groups, or lists the number of classes
        of each. If None, the number of groups stays, but is at most `num_classes`. `InputError`:
        `head_groups` does not fit the head or `num_classes`; or a linear classifier would have no
        pooling; or `global_pool` is set, but the classifier is not linear.
        """
        config = self.config
        if global_pool is not None and num_classes and config.head != "linear":
            raise InputError(f"head {config.head!r} has a pool of its own, got {global_pool!r}")
        if num_classes and config.head != "linear":
            global_pool = "avg"  # a reset to 0 classes may have set '', which is invalid here
        if head_groups is None and config.head_groups and num_classes > 0:
            head_groups = min(len(config.head_groups), num_classes)
        config = replace(
            config,
            num_classes=num_classes,
            global_pool=config.global_pool if global_pool is None else global_pool,
            head_groups=head_groups or (),
        ).checked()
        example = next(self.body.parameters())
        head = build_head(self.num_features, config, device=example.device, dtype=example.dtype)
        # replace the old head only now, so that it stays if building the new head fails
        self.head = head.train(self.head.training)
        self.config, self.num_classes = config, num_classes

    def set_slopes(self, stem_slope: float, block_slope: float) -> None:
        """Set the negative slopes of the leaky ReLUs in the stem and of all others."""
        config = replace(self.config, stem_slope=stem_slope, block_slope=block_slope)
        self.config = config.checked()
        for name, module in self.named_modules():
            ours = isinstance(module, NormAct | ConvNormAct | FoldedConv)
            if ours and module.slope is not None:
                module.slope = stem_slope if name.startswith("body.conv1") else block_slope

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """If `enable`, save only the input of each block, and run the block again in backward."""
        self.grad_checkpointing = enable

    @property
    def default_cfg(self) -> dict[str, Any]:
        """Alias of `pretrained_cfg` for older versions of timm."""
        return self.pretrained_cfg

    @property
    def head_hidden_size(self) -> int:
        """Width of the features that `forward_head` returns with `pre_logits`."""
        fc = self.get_classifier()
        if isinstance(fc, GroupedLinear):
            return fc.groups * fc.in_features
        return self.num_features

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """Return the patterns by which timm groups parameters for layer-wise learning rates."""
        blocks = r"^body\.layer(\d+)" if coarse else r"^body\.layer(\d+)\.(\d+)"
        return {"stem": r"^body\.conv1", "blocks": blocks}

    def no_weight_decay(self) -> set[str]:
        """Return an empty set, because timm itself exempts biases and norms from weight decay."""
        return set()


def feature_extractor(
    model: TResNet, out_indices: int | Sequence[int] | None = None
) -> "FeatureGetterNet":
    """Return timm's module that outputs feature maps, and remove unused layers of `model` in place.

    Index 0 is the stem's map, and indices 1 to 4 (the default) are the maps of the stages. An int n
    means the last n maps. Parameter names get the prefix `model.`. The methods of
    `feature_info`, such as `channels()`, list one value for each returned map.
    """
    from timm.models._features import FeatureGetterNet

    indices: Any = (1, 2, 3, 4) if out_indices is None else out_indices
    extractor: Any = FeatureGetterNet(model, indices)
    extractor.config = model.config
    extractor.pretrained_cfg = extractor.default_cfg = model.pretrained_cfg
    return extractor


def take_indices(indices: int | Sequence[int] | None, count: int) -> list[int]:
    """Return a list of indices in [0, count); an int n means the last n, and None means all."""
    from timm.models._features import feature_take_indices

    try:
        taken = feature_take_indices(count, cast(Any, indices))[0]
        return [operator.index(index) for index in taken]
    except (AssertionError, TypeError, ValueError) as error:
        raise InputError(
            f"expected 1 to {count} as a number of feature maps, or feature indices in "
            f"[{-count}, {count - 1}], got {indices!r}"
        ) from error
