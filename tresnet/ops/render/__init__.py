"""Rendering: decoded crops of many sizes become images of one size, flipped and augmented.

Its definition is Pillow (`reference`), image by image on a CPU. On a GPU, Triton kernels compute
the same values for all images of a batch.
"""

import functools
import logging

import numpy as np
import torch
from torch import Tensor

from tresnet.ops.dispatch import obstacle
from tresnet.ops.render import launch, reference
from tresnet.ops.render.rows import Op, make_row
from tresnet.ops.verdict import verdict

logger = logging.getLogger(__name__)


def render(pixels: Tensor, rows: Tensor, size: tuple[int, int], *, bicubic: bool) -> Tensor:
    """Resize, flip and augment crops; return images (N, 3, height, width), uint8.

    `pixels` (bytes,), uint8, holds the crops (h, w, 3) one after the other. `rows` (N, numbers),
    float64 on the CPU, describes them (see `tresnet.ops.render.rows`). The images are channels_last
    on the device of `pixels`, and have the values that Pillow computes on a CPU. `bicubic` chooses
    the filter of the resizing; the other filter is bilinear. Both average all pixels that they
    shrink, as Pillow does.
    """
    run = launch if runs_kernels(pixels.device) else reference
    return run.render(pixels, rows, size, bicubic).permute(0, 3, 1, 2)


@functools.cache
def runs_kernels(device: torch.device) -> bool:
    """Return whether `render` runs Triton kernels on a device; otherwise Pillow computes.

    Before their first use on a GPU, the kernels must give Pillow's values there.
    """
    if device.type != "cuda" or obstacle(device, torch.float32) is not None:
        return False
    reason = verdict(("render", device), device, functools.partial(compare, device))
    if reason is not None:
        logger.warning("workers make complete images, because kernels cannot: %s", reason)
    return reason is None


def compare(device: torch.device) -> None:
    """Apply every operation to an image; raise `ArithmeticError` if Pillow's result differs."""
    size, crop = (24, 31), np.random.default_rng(0).integers(0, 256, (40, 29, 3), np.uint8)
    turned = 0.9, 0.2, 1.5, -0.25, 1.1, 2.0, 124, 116, 104
    layers = [(Op.AFFINE, *turned, bicubic) for bicubic in (0, 1)]
    layers += [(op, 1.4) for op in (Op.COLOR, Op.SHARPNESS, Op.BRIGHTNESS, Op.CONTRAST, Op.BLUR)]
    layers += [(Op.AUTOCONTRAST,), (Op.EQUALIZE,), (Op.INVERT,), (Op.POSTERIZE, 3)]
    layers += [(Op.SOLARIZE, 99), (Op.SOLARIZE_ADD, 50, 128)]
    rows = [make_row(crop.shape[:2], size, flip=True, layers=[layer]) for layer in layers]
    rows.append(make_row(crop.shape[:2], (50, 60), (4, 7), count=1))
    table, pixels = torch.from_numpy(np.stack(rows)), torch.from_numpy(crop).flatten()
    for bicubic in (False, True):
        found = launch.render(pixels.to(device), table, size, bicubic).cpu()
        wrong = (found != reference.render(pixels, table, size, bicubic)).flatten(1).any(1)
        if wrong.any():
            images = wrong.nonzero().flatten().tolist()
            raise ArithmeticError(f"images {images} differ from Pillow's")


__all__ = ["compare", "render", "runs_kernels"]
