"""Functions that replace modules of a model; outputs stay equal up to rounding."""

from tresnet.surgery.composing import compose
from tresnet.surgery.folding import fold
from tresnet.surgery.merging import ParallelBranches, merge_parallel
from tresnet.surgery.swapping import swap_norm

__all__ = ["ParallelBranches", "compose", "fold", "merge_parallel", "swap_norm"]
