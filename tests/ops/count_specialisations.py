"""Count what one training step of a model launches, and how many kernels Triton compiles for it.

A script, because Triton decides at its import whether it interprets: MODEL and batch sizes; prints
one JSON object a line. Nothing is computed: the model is on `meta`, and launches are noted. Then
follows a step of two images on a CPU, whose launches go through Triton's own launcher, with the
names of the kernels that `tresnet warm` would not have compiled.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
from torch import Tensor, nn
from triton import knobs
from triton.runtime import driver

import tresnet
from tresnet.engine import warm
from tresnet.layers import fusion
from tresnet.ops import ahead, dispatch, operators
from tresnet.ops.abn import Convolution

TARGET = ahead.find_target("sm_90")


class NoConvolution(torch.autograd.Function):
    """Without computing; under autocast to bf16 on a GPU, whose convolutions keep channels last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, step: int) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        size = len(x), len(weight), -(-x.shape[2] // step), -(-x.shape[3] // step)
        out = torch.zeros(size, dtype=torch.bfloat16, device=x.device)
        return out.contiguous(memory_format=torch.channels_last)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        return *(None if t is None else torch.empty_like(t) for t in ctx.saved_tensors), None


def step(name: str, batch: int, device: str) -> None:
    """A forward and a backward pass on bytes."""
    model = tresnet.create(name, device=device, impl="triton")
    images = torch.zeros(batch, 3, 224, 224, device=device, dtype=torch.uint8)
    with torch.autocast("cpu", torch.bfloat16):  # of which `meta` has none
        y = model(images.to(memory_format=torch.channels_last))
    y.float().sum().backward()


@contextmanager
def asked() -> Iterator[set[ahead.Specialisation]]:
    """What is launched meanwhile, in Triton's words; nothing is compiled or runs."""
    found: set[ahead.Specialisation] = set()

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found.add(ahead.Specialisation(fn.module, fn.name, compile["specialization_data"]))
        return True

    knobs.runtime.jit_cache_hook = note
    driver.set_active(ahead._Compiler(TARGET))  # pyright: ignore[reportArgumentType]
    yield found
    knobs.runtime.jit_cache_hook = None


def warmed(name: str, batch: int) -> set[ahead.Specialisation]:
    """What `tresnet warm` would compile for a training step."""
    found: list[ahead.Specialisation] = []
    ahead.compile_all = lambda wanted, *_: found.extend(wanted)
    options: dict[str, Any] = {"amp": "bf16", "channels_last": True, "input": "uint8"}
    warm.warm(name, target="sm_90", batch_size=batch, **options)
    return set(found)


if __name__ == "__main__":
    dispatch.interpreted = lambda: True
    fusion.autocast_dtype = lambda device_type: torch.bfloat16
    nn.Conv2d._conv_forward = lambda self, x, weight, bias: NoConvolution.apply(
        x, weight, bias, self.stride[0]
    )
    Convolution.output = lambda self, x, weight: NoConvolution.apply(x, weight, None, 1)
    Convolution.gradient = lambda self, grad, x, weight, of_weight: torch.empty_like(
        weight if of_weight else x
    )
    known: set[ahead.Specialisation] = set()
    for batch in map(int, sys.argv[2:]):
        with operators.noted() as launches:
            step(sys.argv[1], batch, "meta")
        found = set(ahead.specialisations(launches, TARGET))
        row = {"batch": batch, "launches": len(launches), "kernels": len(found)}
        row |= {"new": len(found - known), "by_name": Counter(one.name for one in found)}
        known |= found
        sys.stdout.write(json.dumps(row) + "\n")
    with asked() as launched:
        step(sys.argv[1], 2, "cpu")
    row = {"batch": 2, "kernels": len(launched)}
    row["not_warm"] = [one.name for one in launched - warmed(sys.argv[1], 2)]
    sys.stdout.write(json.dumps(row) + "\n")
