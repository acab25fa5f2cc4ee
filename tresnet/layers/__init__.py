"""Modules of TResNet; the three exported modules are also useful in other models."""

from tresnet.layers.grouped_linear import GroupedLinear
from tresnet.layers.parallel_bottleneck import ParallelBottleneck
from tresnet.layers.subtracted_conv import SubtractedConv

__all__ = ["GroupedLinear", "ParallelBottleneck", "SubtractedConv"]
