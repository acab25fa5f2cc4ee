"""What kernels borrow from the allocator while they run.

Known sizes are counted. cuDNN picks the algorithm of a convolution at run time and takes its
workspace with it, so without a measurement there is only a bound: nothing is expected, and the
band reaches up to `HIGH_FACTOR` times the bytes the convolution touches, 1 GiB at most. The one
case known so far is VGG16 at batch 128 in fp32, where about 714 MiB at conv5 (107 MiB touched)
would explain what was measured. A table measured on a GPU (`tresnet.memory.convolutions`) replaces
the bound, shape by shape.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tresnet.errors import InputError
from tresnet.memory.device import GIB

aten = torch.ops.aten

HIGH_FACTOR = 8
HIGH_LIMIT_BYTES = GIB

_FORWARD = aten.convolution.default
_BACKWARD = aten.convolution_backward.default
CONVOLUTIONS = (_FORWARD, _BACKWARD)
_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
_FLASH_TILE = 128
_FLASH_HEAD_TILE = 32


@dataclass(frozen=True)
class Workspaces:
    """Workspaces by operation.

    Args:
        table: bytes by `convolution_key`, measured on a GPU; empty for the stated bound.
    """

    table: dict[str, int] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path) -> "Workspaces":
        """Read a table measured on a GPU: JSON, {"workspaces": {convolution_key: bytes}}.

        Raises:
            InputError: the file is missing or is not such a table.
        """
        try:
            table = json.loads(Path(path).read_text(encoding="utf-8"))["workspaces"]
            bad = next((v for v in table.values() if type(v) is not int or v < 0), None)
            if bad is not None:
                raise ValueError(f"{bad!r} is not a number of bytes")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(
                f"expected a table of workspaces at {path} (a JSON object with the key "
                f"'workspaces'), got {type(error).__name__}: {error}"
            ) from error
        return cls(table)

    def of(self, func: Any, args: tuple, outputs: list[torch.Tensor]) -> tuple[int, int]:
        """Bytes that `func` borrows for these arguments: expected, and at most."""
        if func in CONVOLUTIONS:
            return self._convolution(func, args, outputs)
        if func is _FLASH_BACKWARD:
            n_bytes = _flash_backward_bytes(args[1])
            return n_bytes, n_bytes
        return 0, 0

    def _convolution(self, func: Any, args: tuple, outputs: list[torch.Tensor]) -> tuple[int, int]:
        x, weight = (args[1], args[2]) if func is _BACKWARD else (args[0], args[1])
        y = args[0] if func is _BACKWARD else outputs[0]
        known = self.table.get(convolution_key(func, args)) if self.table else None
        if known is not None:
            return known, known
        if weight.shape[1] == 1 and x.shape[1] == weight.shape[0] > 1:
            return 0, 0  # depthwise: PyTorch's own kernels, which borrow nothing
        touched = sum(t.numel() * t.element_size() for t in (x, weight, y))
        return 0, min(HIGH_FACTOR * touched, HIGH_LIMIT_BYTES)


def convolution_key(func: Any, args: tuple) -> str:
    """The name of a convolution in a table: pass, dtype, layout, shapes and parameters."""
    if func is _BACKWARD:
        x, weight = args[1], args[2]
        stride, padding, dilation, groups = args[4], args[5], args[6], args[9]
        which = "".join("xwb"[i] for i, wanted in enumerate(args[10]) if wanted)
    else:
        x, weight = args[0], args[1]
        stride, padding, dilation, groups = args[3], args[4], args[5], args[8]
        which = "y"
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    layout = "last" if last and not x.is_contiguous() else "first"
    sizes = (x.shape, weight.shape, stride, padding, dilation)
    by_x = ("x".join(str(int(v)) for v in values) for values in sizes)
    return " ".join([which, str(x.dtype).removeprefix("torch."), layout, *by_x, str(groups)])


def _flash_backward_bytes(q: torch.Tensor) -> int:
    """The fp32 accumulator of dq and the row sums, padded to whole tiles (flash_api.cpp)."""
    batch, heads, length, head = (int(n) for n in q.shape)
    rows = batch * heads * -(-length // _FLASH_TILE) * _FLASH_TILE
    return 4 * rows * (-(-head // _FLASH_HEAD_TILE) * _FLASH_HEAD_TILE + 1)
