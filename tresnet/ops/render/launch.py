"""Launches of the Triton kernels that render images."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tresnet.ops.launching import LaunchSpec, launch
from tresnet.ops.render import rows as fields
from tresnet.ops.render.rows import LAYER, LAYERS, TABLED, Op

BLOCK = 1024
LAYER_BLOCK = 256  # pixels of a program of `layer`, whose doubles need many registers
ALONG, ACROSS = 128, 16  # values of a program of `resize` on the axis resized first, and the other


def render(pixels: Tensor, rows: Tensor, size: tuple[int, int], bicubic: bool) -> Tensor:
    """Return images (N, height, width, 3) in uint8 on the device of `pixels`."""
    count, stride = rows.shape
    host = rows.numpy()
    ops = host[:, LAYERS::LAYER].astype(int)  # [N, layers]
    if (ops == Op.BLUR).any():
        rows = torch.from_numpy(_with_box_blurs(host, ops))
    device_rows = rows.to(pixels.device, non_blocking=True)  # rows of loaders are pinned
    images = _resize(pixels, device_rows, host, size, bicubic)
    shape = {"stride": stride, "height": size[0], "width": size[1], "pixels": math.prod(size)}
    programs = count, -(-math.prod(size) // LAYER_BLOCK), 3  # channels
    bytewise = count, -(-math.prod(size) * 3 // BLOCK)
    for index in np.flatnonzero(ops.any(axis=0)).tolist():
        place = {**shape, "column": LAYERS + index * LAYER}
        table = torch.empty(count, 3, 256, dtype=torch.uint8, device=pixels.device)
        if np.isin(ops[:, index], TABLED).any():
            _run("tables", (count, 3), images, device_rows, table, **place)
        former, images = images, torch.empty_like(images)
        _run("layer", programs, former, device_rows, table, images, **place, BLOCK=LAYER_BLOCK)
        for axis in (0, 0, 0, 1, 1, 1) if (ops[:, index] == Op.BLUR).any() else ():
            former, images = images, former
            _run("blur", bytewise, former, device_rows, images, **place, VERTICALLY=bool(axis))
    return images


def _resize(
    pixels: Tensor, rows: Tensor, host: np.ndarray, size: tuple[int, int], bicubic: bool
) -> Tensor:
    count, stride = rows.shape
    scales = host[:, fields.HEIGHT : fields.ROWS] / host[:, fields.ROWS : fields.TOP]
    taps = 2 * math.ceil(max(scales.max(), 1) * (2 if bicubic else 1)) + 1
    span = max(size)
    weights = torch.empty(count, 2, taps + 2, span, dtype=torch.int32, device=pixels.device)
    images = torch.empty(count, *size, 3, dtype=torch.uint8, device=pixels.device)
    shape = {"stride": stride, "height": size[0], "width": size[1], "taps": taps, "span": span}
    grid = count, 2, -(-span // ALONG)
    _run("weights", grid, rows, weights, **shape, BICUBIC=bicubic, BLOCK=ALONG)
    grid = count, -(-3 * span // ALONG), -(-span // ACROSS)
    _run("resize", grid, pixels, rows, weights, images, **shape, J=ALONG, B=ACROSS)
    return images


def _with_box_blurs(host: np.ndarray, ops: np.ndarray) -> np.ndarray:
    """Replace each blur's standard deviation by the box that Pillow applies three times."""
    host = host.copy()
    for image, index in np.argwhere(ops == Op.BLUR):
        begin = LAYERS + index * LAYER + 1
        host[image, begin : begin + 3] = box_blur(float(host[image, begin]))
    return host


def box_blur(deviation: float) -> tuple[int, int, int]:
    """Return radius, inner and outer weight (2^24 is 1) of Pillow's box for a Gaussian blur."""
    single = np.float32
    variance = single(deviation) * single(deviation) / single(3)
    length = single(math.sqrt(12.0 * float(variance) + 1.0))
    whole = single(math.floor((float(length) - 1.0) / 2.0))
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance)
    part /= 6 * (variance - (whole + 1) * (whole + 1))
    box = whole + part
    radius = int(box)
    inner = int(single(1 << 24) / (box * 2 + 1))
    return radius, inner, ((1 << 24) - (radius * 2 + 1) * inner) // 2


_compiled: dict[Any, dict[Any, Any]] = {}  # one kernel serves all sizes and numbers of images


def _run(name: str, grid: tuple[int, ...], *tensors: Tensor, **scalars: Any) -> None:
    spec = LaunchSpec(f"render.kernels.{name}", 4, grid, **{"BLOCK": BLOCK, **scalars})
    spec.options["enable_fp_fusion"] = False  # Pillow rounds each product
    constants = (spec.scalars.get(each) for each in spec.kernel.fn.__annotations__)
    spec.compiled = _compiled.setdefault((name, tensors[-1].device, *constants), {})
    launch(spec, **dict(zip(spec.kernel.arg_names, tensors, strict=False)))
