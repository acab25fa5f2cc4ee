"""Estimates of the workspaces that kernels allocate while they run.

cuDNN chooses a convolution's algorithm, and thus the workspace, at run time. The choice cannot be
predicted, so the expected workspace is 0 bytes. The upper bound is `HIGH_FACTOR` times the bytes of
input, weight and output, but at most 1 GiB. For comparison, VGG16's conv5 (batch 128, fp32, 107 MiB
of tensors) seems to take 714 MiB, 6.7 times as much.
"""

from typing import Any

import torch

from tresnet.memory.device import GIB

aten = torch.ops.aten

HIGH_FACTOR = 8
HIGH_LIMIT_BYTES = GIB

_FORWARD = aten.convolution.default
_BACKWARD = aten.convolution_backward.default
_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
_FLASH_TILE = 128  # flash_api.cpp rounds sequence lengths up to multiples of 128
_FLASH_HEAD_TILE = 32  # flash_api.cpp rounds head sizes up to multiples of 32


def workspace_bytes(func: Any, args: tuple, outputs: list[torch.Tensor]) -> tuple[int, int]:
    """Return the expected bytes and the upper bound of the workspace of `func`."""
    if func is _FORWARD:
        return 0, _highest_bytes(args[0], args[1], outputs[0])
    if func is _BACKWARD:
        return 0, _highest_bytes(args[1], args[2], args[0])
    if func is _FLASH_BACKWARD:
        # two padded fp32 buffers: q's gradient, and one sum per row of q
        batch, heads, length, head = (int(n) for n in args[1].shape)
        rows = batch * heads * -(-length // _FLASH_TILE) * _FLASH_TILE
        n_bytes = 4 * rows * (-(-head // _FLASH_HEAD_TILE) * _FLASH_HEAD_TILE + 1)
        return n_bytes, n_bytes
    return 0, 0


def _highest_bytes(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> int:
    if weight.shape[1] == 1 and x.shape[1] == weight.shape[0] > 1:
        return 0  # depthwise: PyTorch runs its own kernels, which need no workspace
    return min(HIGH_FACTOR * (x.nbytes + weight.nbytes + y.nbytes), HIGH_LIMIT_BYTES)
