"""Count what one training step of a model launches, and how many kernels Triton compiles for it.

A script, because Triton decides at its import whether it interprets: MODEL and batch sizes; prints
one JSON object a line. Nothing is computed: the model is on `meta`, and launches are noted.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "0"

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import tresnet
from tresnet.fused import applies
from tresnet.fused.stage import Conv
from tresnet.ops import dispatch, operators


def convolved(self: Conv, x: Tensor) -> Tensor:
    """An output without values, in the layout that a GPU's convolutions in 16 bits keep."""
    step = self.stride[0]
    size = len(x), len(self.weight), -(-x.shape[2] // step), -(-x.shape[3] // step)
    return torch.empty(size, dtype=x.dtype, device=x.device).contiguous(
        memory_format=torch.channels_last
    )


def gradients(self: Conv, grad: Tensor, x: Tensor, of_x: bool, of_weight: bool) -> tuple[Any, Any]:
    """Gradients without values."""
    grad_weight = torch.empty_like(self.weight) if of_weight else None
    return torch.empty_like(x) if of_x else None, grad_weight


def step(name: str, batch: int) -> None:
    """A forward and a backward pass on bytes."""
    model = tresnet.create(name, device="meta", impl="triton")
    images = torch.zeros(batch, 3, 224, 224, device="meta", dtype=torch.uint8)
    with torch.autocast("cpu", torch.bfloat16):  # of which `meta` has none
        y = model(images.to(memory_format=torch.channels_last))
    y.float().sum().backward()


class Specialisation(NamedTuple):
    """A kernel that Triton tells from others: where its function is, and Triton's own words."""

    module: str
    name: str
    data: str


class Pointer:
    """In place of a tensor on the GPU: what Triton reads of one."""

    def __init__(self, x: Tensor) -> None:
        # PyTorch's allocator gives multiples of 512 bytes
        self.dtype, self._offset = x.dtype, int(x.storage_offset()) * x.element_size()

    def data_ptr(self) -> int:
        return self._offset


class Driver:
    """In place of Triton's driver, which wants a GPU: compiles for an H100."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def specialisations(launches: Sequence[operators.Launch]) -> set[Specialisation]:
    """What Triton would compile for these launches; it compiles nothing."""
    found = set()

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found.add(Specialisation(fn.module, fn.name, compile["specialization_data"]))
        return True  # nothing is left for Triton to do

    knobs.runtime.jit_cache_hook = note
    driver.set_active(Driver())  # pyright: ignore[reportArgumentType]
    for kernel, tensors, numbers, warps in launches:
        kernel.warmup(*map(Pointer, tensors), *numbers, grid=(1, 1, 1), num_warps=warps)
    return found


if __name__ == "__main__":
    dispatch.interpreted = lambda: True
    applies.autocast_dtype = lambda device_type: torch.bfloat16
    Conv.forward, Conv.backward = convolved, gradients
    known: set[Specialisation] = set()
    for batch in map(int, sys.argv[2:]):
        with operators.noted() as launches:
            step(sys.argv[1], batch)
        found = specialisations(launches)
        row = {"batch": batch, "launches": len(launches), "kernels": len(found)}
        row |= {"new": len(found - known), "by_name": Counter(one.name for one in found)}
        known |= found
        sys.stdout.write(json.dumps(row) + "\n")
