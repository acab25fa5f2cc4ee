"""Space-to-depth in plain PyTorch."""

import torch
from torch import Tensor


def space_to_depth(x: Tensor, block_size: int) -> Tensor:
    """Move each block of pixels into the channels (section 2.1 of TResNet's paper).

    Output channels are ordered (row, column, input channel), as the published weights expect.
    `torch.nn.functional.pixel_unshuffle` orders channels (input channel, row, column).
    """
    n, c, h, w = x.shape
    rows, columns = h // block_size, w // block_size
    pixels = x.permute(0, 2, 3, 1)
    nhwc = pixels.is_contiguous() and not x.is_contiguous()
    blocks = pixels.reshape(n, rows, block_size, columns, block_size, c)
    if nhwc:
        blocks = blocks.permute(0, 1, 3, 2, 4, 5)
        return blocks.reshape(n, rows, columns, block_size * block_size * c).permute(0, 3, 1, 2)
    blocks = blocks.permute(0, 2, 4, 5, 1, 3)
    return blocks.reshape(n, block_size * block_size * c, rows, columns)


def stem_input(x: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    """Divide uint8 images by 255 and apply `space_to_depth`; the result is channels_last."""
    y = space_to_depth(x.contiguous(memory_format=torch.channels_last), block_size)
    return (y.float() / 255).to(dtype).contiguous(memory_format=torch.channels_last)
