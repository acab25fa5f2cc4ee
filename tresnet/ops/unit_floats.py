"""Conversion of uint8 images to floats in [0, 1]."""

import torch
from torch import Tensor


def unit_floats(
    images: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.preserve_format,
    largest: Tensor | float = 255.0,
) -> Tensor:
    """Divide uint8 images (N, C, H, W) by 255 in float32, and write the result in `dtype`.

    By default, the result has the memory format of `images`. `largest` must be 255. As a tensor of
    shape () on the images' device, it gives torchvision's result bit for bit. As a number, it makes
    a GPU multiply by the rounded inverse, so the last bit may differ.
    """
    floats = torch.empty_like(images, dtype=dtype, memory_format=memory_format)
    return torch.div(images, largest, out=floats)
