"""The modules TResNet is assembled from, a thin file each; those below stand on their own too."""

from tresnet.layers.grouped_linear import GroupedLinear
from tresnet.layers.parallel_bottleneck import ParallelBottleneck
from tresnet.layers.subtracted_conv import SubtractedConv

__all__ = ["GroupedLinear", "ParallelBottleneck", "SubtractedConv"]
