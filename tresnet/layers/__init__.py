"""Modules of TResNet, one thin file each; the three below are also useful on their own."""

from tresnet.layers.grouped_linear import GroupedLinear
from tresnet.layers.parallel_bottleneck import ParallelBottleneck
from tresnet.layers.subtracted_conv import SubtractedConv

__all__ = ["GroupedLinear", "ParallelBottleneck", "SubtractedConv"]
