"""Exact rewrites of a built model: the same function by fewer or larger operations."""

from tresnet.models.padding import pad_channels, unpad_channels
from tresnet.surgery.compose import compose, compose_cat, compose_sum
from tresnet.surgery.fold import fold
from tresnet.surgery.fuse import fuse
from tresnet.surgery.merge_parallel import ParallelBranches, merge_parallel, split
from tresnet.surgery.replace_conv import replace_conv
from tresnet.surgery.swap_norm import swap_norm

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
