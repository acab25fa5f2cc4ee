"""Images of bytes as floats in [0, 1]."""

import torch
from torch import Tensor


def unit_floats(
    images: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.preserve_format,
    largest: Tensor | float = 255.0,
) -> Tensor:
    """Divide uint8 images (N, C, H, W) by 255 in fp32, in one pass that writes `dtype`.

    The memory format is that of the images by default. `largest` is 255 as a number, or as a tensor
    () on the images' device. A GPU multiplies by the inverse of a number, which rounds a second
    time; with a tensor the result equals torchvision's conversion to the bit.
    """
    floats = torch.empty_like(images, dtype=dtype, memory_format=memory_format)
    return torch.div(images, largest, out=floats)
