"""Launch of the Triton kernel that divides images by 255 and applies space-to-depth."""

import math

import torch
from torch import Tensor

from tresnet.ops.launching import LaunchSpec, launch
from tresnet.ops.tiles import cached_per_layout, dense

BLOCK = 1024
WIDEST = 4  # most values that a thread copies at once: 4 bytes of input, 8 or 16 of output


def stem_input(x: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    """Turn uint8 images (N, C, H, W) into channels_last (N, b*b*C, H/b, W/b) in [0, 1]."""
    n, c, h, w = x.shape
    size = n, h // block_size, w // block_size, block_size * block_size * c
    out = torch.empty(size, dtype=dtype, device=x.device)
    launch(_stem(x, dtype, block_size), x=dense(x), out=out)
    return out.permute(0, 3, 1, 2)


@cached_per_layout
def _stem(x: Tensor, dtype: torch.dtype, block_size: int) -> LaunchSpec:
    n, c, h, w = x.shape
    width = w * block_size * c
    return LaunchSpec(
        "space_to_depth.kernels.stem_input", 4, (n * h // block_size, -(-width // BLOCK)),
        WIDTH=width, C=c, BLOCK=BLOCK, B=block_size, RUN=math.gcd(block_size * c, WIDEST),
    )  # fmt: skip
