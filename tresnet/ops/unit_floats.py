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
    """Divide bytes by 255 in fp32, in one pass that writes `dtype` in the requested memory format.

    Args:
        images: (N, C, H, W), uint8.
        dtype: Type of the result.
        memory_format: Memory format of the result; by default that of the images.
        largest: 255, as a number, or as a tensor () on the images' device: a GPU multiplies by the
            inverse of a number, which rounds a second time.

    Returns:
        (N, C, H, W); with a tensor equal to torchvision's conversion to the bit, also on a GPU.
    """
    floats = torch.empty_like(images, dtype=dtype, memory_format=memory_format)
    return torch.div(images, largest, out=floats)
