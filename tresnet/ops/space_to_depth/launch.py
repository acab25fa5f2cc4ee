"""Launch of the Triton kernel that divides images by 255 and applies space-to-depth."""

import math

import torch
from torch import Tensor

from tresnet.ops.launching import LaunchSpec, launch
from tresnet.ops.tiles import cached_per_layout

BLOCK = 1024
WIDEST = 4  # most values that a thread copies at once: 4 bytes of input, 8 or 16 of output


def stem_input(x: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    """Turn uint8 images (N, C, H, W) into channels_last (N, b*b*C, H/b, W/b) in [0, 1]."""
    size, spec = _stem(x, dtype, block_size)
    out = torch.empty(size, dtype=dtype, device=x.device)
    launch(spec, x=x, out=out)
    return out.permute(0, 3, 1, 2)


@cached_per_layout
def _stem(x: Tensor, dtype: torch.dtype, block_size: int) -> tuple[tuple[int, ...], LaunchSpec]:
    (n, c, h, w), (xn, xc, xh, xw) = x.shape, x.stride()
    size = n, h // block_size, w // block_size, block_size * block_size * c
    rows, width = n * size[1], size[2] * size[3]
    # a thread copies `run` values at once; 0 if neighbours in the output are not neighbours in `x`
    run = math.gcd(block_size * c, xn, xh, WIDEST)
    if (xc != 1 and c > 1) or xw != c:
        run = 0
    spec = LaunchSpec(
        "space_to_depth.kernels.stem_input", 4, (rows, -(-width // BLOCK)), xn=xn, xc=xc, xh=xh,
        xw=xw, rows=size[1], WIDTH=width, C=c, BLOCK=BLOCK, B=block_size, RUN=run,
    )  # fmt: skip
    return size, spec
