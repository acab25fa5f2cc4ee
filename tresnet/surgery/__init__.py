"""Exact rewrites of a built model: the same function by fewer or larger operations."""

from tresnet.models.padding import pad_channels, unpad_channels
from tresnet.surgery.composing import compose, compose_cat, compose_sum
from tresnet.surgery.folding import fold
from tresnet.surgery.merging import ParallelBranches, merge_parallel, split
from tresnet.surgery.subtracting import fuse, replace_conv
from tresnet.surgery.swapping import swap_norm

__all__ = [
    "ParallelBranches",
    "compose",
    "compose_cat",
    "compose_sum",
    "fold",
    "fuse",
    "merge_parallel",
    "pad_channels",
    "replace_conv",
    "split",
    "swap_norm",
    "unpad_channels",
]
