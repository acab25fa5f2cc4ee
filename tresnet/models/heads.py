"""Classifier heads."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tresnet.errors import InputError
from tresnet.layers.conv_norm_act import ConvNormAct
from tresnet.layers.global_pool import GlobalPool2d
from tresnet.layers.grouped_linear import GroupedLinear
from tresnet.layers.parallel_bottleneck import ParallelBottleneck
from tresnet.ops import recompute
from tresnet.ops.dispatch import traced

HEADS = ("linear", "group_attention", "ml_decoder")
DEFAULT_GROUPS = 12
DEFAULT_CHANNELS = {"group_attention": 512, "ml_decoder": 768}


class LinearHead(nn.Module):
    """Global pool, dropout, linear."""

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        pool_type: str = "avg",
        drop_rate: float = 0.0,
        jit: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create pool and linear layer.

        Args:
            in_features: channels C of the feature map (N, C, H, W).
            num_classes: width of the output; 0 returns the pooled features.
            pool_type: see `tresnet.layers.global_pool.GlobalPool2d`.
            drop_rate: probability of dropping a feature in training.
            jit: run the TorchScript form of the average pool.
            device: where the parameters live.
            dtype: floating-point type of the parameters.

        Raises:
            InputError: `num_classes` is negative, or there is a classifier but no pool.
        """
        super().__init__()
        if num_classes < 0:
            raise InputError(f"expected num_classes of 0 or more, got {num_classes}")
        if num_classes and not pool_type:
            raise InputError(
                "a classifier needs a global pool: expected num_classes=0 with no pool"
            )
        self.in_features = in_features
        self.drop_rate = drop_rate
        self.global_pool = GlobalPool2d(pool_type, jit)
        self.drop = nn.Dropout(drop_rate)
        self.fc = (
            nn.Linear(in_features, num_classes, device=device, dtype=dtype)
            if num_classes
            else nn.Identity()
        )
        if isinstance(self.fc, nn.Linear):
            nn.init.normal_(self.fc.weight, std=0.01)

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """(N, C, H, W) to (N, num_classes), or to the pooled features (N, C) if `pre_logits`."""
        x = self.drop(self.global_pool(x))
        return x if pre_logits else self.fc(x)


@dataclass(frozen=True)
class HeadSettings:
    """What a head is built from besides its kind and width.

    Attributes:
        pool_type: pooling of the linear head; see `tresnet.layers.global_pool.GlobalPool2d`.
        drop_rate: probability of dropping a feature in training.
        jit: run the TorchScript form of the average pool.
        groups: classes of each group, of 'group_attention'.
        channels: channels of each group, or the width of the decoder.
        norm: 'abn', 'batchnorm' or 'inplace_abn'.
        slope: negative slope of the leaky ReLUs.
    """

    pool_type: str = "avg"
    drop_rate: float = 0.0
    jit: bool = False
    groups: tuple[int, ...] = ()
    channels: int | None = None
    norm: str = "abn"
    slope: float = 1e-3


class GroupAttentionHead(nn.Module):
    """1x1, ABN, attention bottlenecks in parallel, global max pool, dropout, grouped linear.

    For many labels that fall into groups: each group of classes has a bottleneck of its own, which
    looks at the same reduced features, and a linear layer of its own.
    """

    def __init__(
        self,
        in_features: int,
        settings: HeadSettings,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create and initialise the layers.

        Args:
            in_features: channels C of the feature map (N, C, H, W).
            settings: groups, channels of each group, norm and dropout.
            device: where the parameters live.
            dtype: floating-point type of the parameters.

        Raises:
            InputError: a group has no class, or the channels are odd.
        """
        super().__init__()
        channels = settings.channels or DEFAULT_CHANNELS["group_attention"]
        counts, norm, slope = settings.groups, settings.norm, settings.slope
        self.in_features = in_features
        self.norm = norm
        self.reduce = ConvNormAct(
            in_features, channels, 1, norm=norm, slope=slope, device=device, dtype=dtype
        )
        self.attention = ParallelBottleneck(
            len(counts), channels, norm=norm, slope=slope, device=device, dtype=dtype
        )
        self.global_pool = GlobalPool2d("max")
        self.drop = nn.Dropout(settings.drop_rate)
        self.fc = GroupedLinear(channels, counts, device=device, dtype=dtype)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="leaky_relu")
        self.attention.last_norm.zero_init()

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """(N, C, H, W) to (N, num_classes), or to (N, groups * channels) if `pre_logits`."""
        x = self.attention(self.reduce(x)) if torch.jit.is_scripting() else self._attend(x)
        x = self.drop(self.global_pool(x))
        return x if pre_logits else self.fc(x)

    @torch.jit.unused
    def _attend(self, x: Tensor) -> Tensor:
        with recompute.scope(not traced() and self.norm == "abn" and torch.is_grad_enabled()):
            return self.attention(self.reduce(x))


class _DecoderLayers(nn.Module):
    """Runs timm's decoder layers, under the names they have in `nn.TransformerDecoder`.

    Since PyTorch 2.1 that class asks its layers for a self-attention and passes arguments that
    timm's layer, which has none, does not take.
    """

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, queries: Tensor, memory: Tensor) -> Tensor:
        """(queries, N, D) and (pixels, N, D) to (queries, N, D)."""
        for layer in self.layers:
            queries = layer(queries, memory)
        return queries


class MLDecoderHead(nn.Module):
    """timm's ML-Decoder (arXiv 2111.12933): queries attend to the feature map."""

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        settings: HeadSettings,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create timm's layer.

        Args:
            in_features: channels C of the feature map (N, C, H, W).
            num_classes: width of the output.
            settings: channels of the decoder, a multiple of its 8 attention heads.
            device: where the parameters live.
            dtype: floating-point type of the parameters.

        Raises:
            InputError: the channels do not divide by 8.
        """
        super().__init__()
        from timm.layers.ml_decoder import MLDecoder

        channels = settings.channels or DEFAULT_CHANNELS["ml_decoder"]
        if channels % 8:
            raise InputError(
                f"expected head_channels divisible by the decoder's 8 heads, got {channels}"
            )
        self.in_features = in_features
        with torch.device(device or torch.get_default_device()):
            decoder = MLDecoder(
                num_classes, decoder_embedding=channels, initial_num_features=in_features
            )
        decoder.decoder = _DecoderLayers(decoder.decoder.layers)  # pyright: ignore[reportAttributeAccessIssue]
        self.fc = decoder.to(dtype or torch.get_default_dtype())

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """(N, C, H, W) to (N, num_classes); if `pre_logits`, to the mean over the pixels (N, C)."""
        return x.mean(dim=(2, 3)) if pre_logits else self.fc(x)


Head = LinearHead | GroupAttentionHead | MLDecoderHead


def build_head(
    kind: str,
    in_features: int,
    num_classes: int,
    settings: HeadSettings,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Head:
    """Build a head; without classes that is a pool, whatever the kind.

    Args:
        kind: 'linear', 'group_attention' or 'ml_decoder'.
        in_features: channels of the feature map.
        num_classes: width of the output; 0 for pooled features.
        settings: the rest.
        device: where the parameters live.
        dtype: floating-point type of the parameters.

    Raises:
        InputError: a value does not fit.
    """
    if num_classes and kind == "group_attention":
        return GroupAttentionHead(in_features, settings, device, dtype)
    if num_classes and kind == "ml_decoder":
        return MLDecoderHead(in_features, num_classes, settings, device, dtype)
    pool, drop = settings.pool_type, settings.drop_rate
    return LinearHead(in_features, num_classes, pool, drop, settings.jit, device, dtype)


def class_groups(
    kind: str, num_classes: int, groups: int | Sequence[int] | None
) -> tuple[int, ...]:
    """Return the classes of each group: as given, or spread evenly, earlier groups getting more.

    Args:
        kind: kind of the head; only 'group_attention' has groups.
        num_classes: how many classes there are.
        groups: the classes of each group, or how many groups; None for 12, or one for each class.

    Raises:
        InputError: the counts do not add up, there are more groups than classes, or the head has
            no groups.
    """
    if kind != "group_attention":
        if groups:
            raise InputError(f"head_groups={groups} needs head='group_attention', got {kind!r}")
        return ()
    if num_classes == 0:
        return ()
    if groups is None or isinstance(groups, int):
        count = min(DEFAULT_GROUPS, num_classes) if groups is None else groups
        if not 1 <= count <= num_classes:
            raise InputError(
                f"expected 1 to {num_classes} groups for {num_classes} classes, got "
                f"head_groups={groups}"
            )
        least, more = divmod(num_classes, count)
        return tuple(least + (index < more) for index in range(count))
    if not isinstance(groups, list | tuple):
        raise InputError(f"expected head_groups as a number or a list of them, got {groups!r}")
    counts = tuple(groups)
    check_class_groups(counts, num_classes)
    return counts


def check_class_groups(counts: Sequence[int], num_classes: int) -> None:
    """Check that the classes of the groups add up to all.

    Raises:
        InputError: they do not, or a group has none or part of one.
    """
    if not all(isinstance(count, int) and count >= 1 for count in counts):
        raise InputError(f"expected at least one class in each group, got head_groups={counts}")
    if sum(counts) != num_classes:
        raise InputError(
            f"expected head_groups that add up to num_classes={num_classes}, got {tuple(counts)}, "
            f"which add up to {sum(counts)}"
        )
