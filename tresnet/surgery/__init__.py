"""Exact rewrites of a built model: the same function by fewer or larger operations."""

from tresnet.surgery.composing import compose
from tresnet.surgery.folding import fold
from tresnet.surgery.merging import ParallelBranches, merge_parallel
from tresnet.surgery.swapping import swap_norm

__all__ = ["ParallelBranches", "compose", "fold", "merge_parallel", "swap_norm"]
