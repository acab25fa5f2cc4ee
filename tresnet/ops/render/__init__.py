"""Rendering: decoded crops of many sizes become images of one size, flipped and augmented."""

import torch
from torch import Tensor

from tresnet.ops.dispatch import obstacle
from tresnet.ops.render import launch, reference


def render(pixels: Tensor, rows: Tensor, size: tuple[int, int], *, bicubic: bool) -> Tensor:
    """Resize, flip, augment and erase crops; return images (N, 3, height, width), uint8.

    `pixels` (bytes,), uint8, holds the crops (h, w, 3) one after the other. `rows` (N, numbers),
    float64 on the CPU, describes them (see `tresnet.ops.render.rows`). The images are channels_last
    on the device of `pixels`, and have the values that Pillow computes on a CPU. `bicubic` chooses
    the filter of the resizing; the other filter is bilinear. Both average all pixels that they
    shrink, as Pillow does.
    """
    run = launch if runs_kernels(pixels.device) else reference
    return run.render(pixels, rows, size, bicubic).permute(0, 3, 1, 2)


def runs_kernels(device: torch.device) -> bool:
    """Return whether `render` runs Triton kernels on a device; otherwise Pillow computes."""
    return device.type == "cuda" and obstacle(device, torch.float32) is None


__all__ = ["render", "runs_kernels"]
