"""Exact rewrites of a built model: the same function by fewer or larger operations."""

from tresnet.surgery.compose import compose, compose_cat, compose_sum
from tresnet.surgery.fuse import fuse
from tresnet.surgery.merge_parallel import merge_parallel
from tresnet.surgery.parallel import ParallelBranches, pick_fastest, split
from tresnet.surgery.replace_conv import replace_conv

__all__ = [
    "ParallelBranches",
    "compose",
    "compose_cat",
    "compose_sum",
    "fuse",
    "merge_parallel",
    "pick_fastest",
    "replace_conv",
    "split",
]
