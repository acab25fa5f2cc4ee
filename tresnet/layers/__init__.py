"""Modules of TResNet, one in each file. The three exported modules also suit other models."""

from tresnet.layers.grouped_linear import GroupedLinear
from tresnet.layers.parallel_bottleneck import ParallelBottleneck
from tresnet.layers.subtracted_conv import SubtractedConv

__all__ = ["GroupedLinear", "ParallelBottleneck", "SubtractedConv"]
