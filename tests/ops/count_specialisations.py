"""Count what one training step of a model launches, and how many kernels Triton compiles for it.

A script, because Triton decides at its import whether it interprets: MODEL and batch sizes; prints
one JSON object a line. Nothing is computed: the model is on `meta`, and launches are recorded.
"""

import json
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import tresnet
from tests.ops.compile_kernels import Recorder, source_of
from tresnet.ops import dispatch
from tresnet.ops.abn import kernels, launch
from tresnet.ops.blur_pool import kernels as blur_kernels
from tresnet.ops.blur_pool import launch as blur_launch
from tresnet.ops.excite import kernels as excite_kernels
from tresnet.ops.excite import launch as excite_launch
from tresnet.ops.space_to_depth import kernels as stem_kernels
from tresnet.ops.space_to_depth import launch as stem_launch

RECORDERS: list[Recorder] = []
convolution = functional.conv2d


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any) -> Tensor:
    """As under autocast to bf16 on a GPU, whose convolutions keep channels last."""
    y = convolution(x.bfloat16(), weight.bfloat16(), bias, *rest)
    return y.contiguous(memory_format=torch.channels_last)


def step(name: str, batch: int) -> list[Any]:
    """The launches of a forward and a backward pass on bytes."""
    for recorder in RECORDERS:
        recorder.launches.clear()
    model = tresnet.create(name, device="meta", impl="triton")
    images = torch.empty(batch, 3, 224, 224, device="meta", dtype=torch.uint8)
    model(images.to(memory_format=torch.channels_last)).float().sum().backward()
    return [launched for recorder in RECORDERS for launched in recorder.launches]


def specialisation(
    function: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[str, ...]:
    """What two launches share if Triton compiles one kernel for both, its name first."""
    source = source_of(function, args, options)
    parts = (source.signature, source.constants, source.attrs, options["num_warps"])
    return (function.__name__, *map(str, parts))


if __name__ == "__main__":
    dispatch.interpreted = lambda: True
    torch.conv2d = functional.conv2d = conv2d
    for module, where in (
        (kernels, launch),
        (blur_kernels, blur_launch),
        (excite_kernels, excite_launch),
        (stem_kernels, stem_launch),
    ):
        RECORDERS.append(Recorder(module))
        setattr(where, "_kernels", lambda recorder=RECORDERS[-1]: recorder)  # noqa: B010
    known: set[tuple[str, ...]] = set()
    for batch in map(int, sys.argv[2:]):
        launches = step(sys.argv[1], batch)
        found = {specialisation(*launched) for launched in launches}
        row = {"batch": batch, "launches": len(launches), "kernels": len(found)}
        row |= {"new": len(found - known), "by_name": Counter(name for name, *_ in found)}
        known |= found
        sys.stdout.write(json.dumps(row) + "\n")
