"""Classifier heads, which map the last feature map to logits."""

from typing import Any

import torch
from torch import Tensor, nn

from tresnet.errors import InputError
from tresnet.layers.conv_norm_act import ConvNormAct
from tresnet.layers.global_pool import GlobalPool2d
from tresnet.layers.grouped_linear import GroupedLinear
from tresnet.layers.parallel_bottleneck import ParallelBottleneck
from tresnet.layers.symbolic import record_call, symbolic
from tresnet.settings.model import ModelConfig

DEFAULT_CHANNELS = {"bottleneck": 512, "group_attention": 512, "ml_decoder": 768}


class LinearHead(nn.Module):
    """Head with a global pool, dropout and, unless `num_classes` is 0, a linear layer."""

    def __init__(self, in_features: int, config: ModelConfig, **factory_kwargs: Any) -> None:
        super().__init__()
        self.global_pool = GlobalPool2d(config.global_pool, config.jit)
        self.drop = nn.Dropout(config.drop_rate)
        self.fc = nn.Identity()
        if config.num_classes:
            self.fc = nn.Linear(in_features, config.num_classes, **factory_kwargs)
            if not self.fc.weight.is_meta:
                nn.init.normal_(self.fc.weight, std=0.01)

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map (N, C, H, W) to (N, num_classes), or to pooled features (N, C) if `pre_logits`."""
        x = self.drop(self.global_pool(x))
        return x if pre_logits else self.fc(x)


class BottleneckHead(LinearHead):
    """Linear head of two layers, without an activation between them, as in ASL (arXiv 2009.14119).

    The first layer maps pooled features to `head_channels` features, for many classes.
    """

    def __init__(self, in_features: int, config: ModelConfig, **factory_kwargs: Any) -> None:
        channels = config.head_channels or DEFAULT_CHANNELS["bottleneck"]
        super().__init__(channels, config, **factory_kwargs)
        self.fc = nn.Sequential(nn.Linear(in_features, channels, **factory_kwargs), self.fc)


class GroupAttentionHead(nn.Module):
    """Head with one bottleneck and one linear layer for each group of classes.

    A 1x1 `ConvNormAct` runs before the bottlenecks; a global max pool and dropout run after them.
    """

    def __init__(self, in_features: int, config: ModelConfig, **factory_kwargs: Any) -> None:
        """Create and initialise the layers; raise `InputError` if `head_channels` is odd."""
        super().__init__()
        channels = config.head_channels or DEFAULT_CHANNELS["group_attention"]
        kind: Any = {"norm": config.norm, "slope": config.block_slope, **factory_kwargs}
        self.reduce = ConvNormAct(in_features, channels, 1, **kind)
        self.attention = ParallelBottleneck(len(config.head_groups), channels, **kind)
        self.global_pool = GlobalPool2d("max")
        self.drop = nn.Dropout(config.drop_rate)
        self.fc = GroupedLinear(channels, config.head_groups, **factory_kwargs)
        for module in self.modules():
            if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="leaky_relu")
        self.attention.conv3.bn.zero_init()

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map (N, C, H, W) to (N, num_classes), or to (N, groups * channels) if `pre_logits`."""
        if symbolic(x):
            return record_call(self, x, pre_logits)
        x = self.drop(self.global_pool(self.attention(self.reduce(x))))
        return x if pre_logits else self.fc(x)


class _DecoderLayers(nn.Module):
    """Replacement of `nn.TransformerDecoder`, which reads `self_attn`; timm's layers have none."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, queries: Tensor, memory: Tensor) -> Tensor:
        for layer in self.layers:
            queries = layer(queries, memory)
        return queries


class MLDecoderHead(nn.Module):
    """timm's ML-Decoder head (arXiv 2111.12933), whose queries attend to the feature map."""

    def __init__(self, in_features: int, config: ModelConfig, device: Any, dtype: Any) -> None:
        """Create timm's layer; raise `InputError` if 8 does not divide `head_channels`."""
        super().__init__()
        from timm.layers.ml_decoder import MLDecoder

        channels = config.head_channels or DEFAULT_CHANNELS["ml_decoder"]
        if channels % 8:
            raise InputError(
                f"expected head_channels divisible by the decoder's 8 heads, got {channels}"
            )
        with torch.device(device or torch.get_default_device()):
            decoder: Any = MLDecoder(
                config.num_classes, config.head_queries or -1, channels, in_features
            )
        decoder.decoder = _DecoderLayers(decoder.decoder.layers)
        self.fc = decoder.to(dtype or torch.get_default_dtype())

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map (N, C, H, W) to (N, num_classes), or to pooled features (N, C) if `pre_logits`."""
        if symbolic(x):
            return record_call(self, x, pre_logits)
        return x.mean(dim=(2, 3)) if pre_logits else self.fc(x)


Head = LinearHead | GroupAttentionHead | MLDecoderHead
_HEADS: dict[str, Any] = {
    "linear": LinearHead,
    "bottleneck": BottleneckHead,
    "group_attention": GroupAttentionHead,
    "ml_decoder": MLDecoderHead,
}


def build_head(in_features: int, config: ModelConfig, **factory_kwargs: Any) -> Head:
    """Build the head named `config.head`, or for 0 classes a `LinearHead` without classifier."""
    return _HEADS[config.head if config.num_classes else "linear"](
        in_features, config, **factory_kwargs
    )
