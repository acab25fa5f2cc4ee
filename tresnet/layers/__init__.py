"""Layers of TResNet, and three public layers (`__all__`) that suit any model."""

from tresnet.layers.grouped_linear import GroupedLinear
from tresnet.layers.parallel_bottleneck import ParallelBottleneck
from tresnet.layers.subtracted_conv import SubtractedConv

__all__ = ["GroupedLinear", "ParallelBottleneck", "SubtractedConv"]
