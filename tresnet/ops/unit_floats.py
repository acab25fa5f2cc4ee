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

    By default, the memory format stays. `largest` is 255, as a number or as a tensor of shape () on
    the images' device. With a tensor, the result equals torchvision's conversion bit for bit. With
    a number, a GPU multiplies by the rounded inverse, so results may differ in the last bit.
    """
    floats = torch.empty_like(images, dtype=dtype, memory_format=memory_format)
    return torch.div(images, largest, out=floats)
