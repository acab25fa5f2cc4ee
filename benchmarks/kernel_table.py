#!/usr/bin/env python3
"""Launches of a training step on an H100: programs, registers, waves and bytes of each kernel.

    python3 benchmarks/kernel_table.py tresnet_m --batch-size 256

No GPU is needed, and nothing is computed: the model is on `meta`, its launches are collected, and
Triton compiles their kernels. A wave is the number of programs that run at once; `idle` is the
fraction of all waves that the last wave leaves empty. Bytes are those of the tensors of a launch,
each counted once. The table is printed, and recorded in benchmarks/records.
"""

import dataclasses
import math
import os
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
import tyro
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from tyro.conf import Positional, arg

import tresnet
from tresnet.cli.output import format_table, say
from tresnet.fused import applies
from tresnet.fused.stage import Conv
from tresnet.measure.records import RecordFile
from tresnet.ops import dispatch, launching

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
# Of an H100: multiprocessors, and of each registers, warps and bytes of shared memory, of which
# every program takes one KiB more than it asks for.
MULTIPROCESSORS, REGISTERS, WARPS, SHARED = 132, 65536, 64, 228 * 1024


def compile_for(capability: int) -> None:
    """Let Triton compile for a GPU, without a driver."""
    target = GPUTarget("cuda", capability, 32)
    functions = {"target": lambda: target, "device": lambda: 0, "stream": lambda device: 0}
    stand_in = SimpleNamespace(**{f"get_current_{k}": v for k, v in functions.items()})
    driver.set_active(stand_in)  # pyright: ignore[reportArgumentType]


def compiled(launch: launching.Launch) -> Any:
    """Return Triton's kernel for a launch, with the alignment of PyTorch's allocator."""

    def pointer(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return SimpleNamespace(dtype=x.dtype, data_ptr=lambda: x.storage_offset() * x.itemsize)

    arguments = {name: pointer(value) for name, value in launch.arguments.items()}
    return launch.kernel.warmup(**arguments, grid=launch.grid, **launch.options)


def resources(kernel: Any) -> dict[str, int]:
    """Return registers, stack and local bytes of a thread, from the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fields = dict(part.split(":") for part in text.split() if part.count(":") == 1)
    return {key.lower(): int(fields[key]) for key in ("REG", "STACK", "LOCAL")}


def resident(registers: int, warps: int, shared: int) -> int:
    """Return the number of programs that run at once on a multiprocessor."""
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    return min(by_registers, SHARED // (shared + 1024), WARPS // warps)


def constants(launch: launching.Launch) -> dict[str, Any]:
    """Return the kernel's constants by name."""
    names = launch.kernel.arg_names
    return {names[index]: launch.arguments[names[index]] for index in launch.kernel.constexprs}


def tensors(launch: launching.Launch) -> list[Tensor]:
    """Return the tensors of a launch."""
    return [value for value in launch.arguments.values() if isinstance(value, Tensor)]


def noted_step(name: str, batch: int) -> list[launching.Launch]:
    """Return the launches of forward and backward on bytes, in bfloat16 and channels_last."""

    def convolved(self: Conv, x: Tensor) -> Tensor:
        size = len(x), len(self.weight), *(-(-side // self.stride[0]) for side in x.shape[2:])
        return x.new_empty(size).to(memory_format=torch.channels_last)

    def gradients(self: Conv, grad: Tensor, x: Tensor, of_x: bool, of_weight: bool) -> Any:
        return torch.empty_like(x) if of_x else None, self.weight if of_weight else None

    dispatch.interpreted = lambda: True
    applies.autocast_dtype = lambda device_type: torch.bfloat16  # `meta` has none
    Conv.forward, Conv.backward = convolved, gradients
    model = tresnet.create(name, device="meta", impl="triton")
    images = torch.zeros(batch, 3, 224, 224, device="meta", dtype=torch.uint8)
    with launching.noted() as launches, torch.autocast("cpu", torch.bfloat16):
        y = model(images.to(memory_format=torch.channels_last))
        y.float().sum().backward()
    return launches


def row(launch: launching.Launch) -> dict[str, Any]:
    """Return the resources that one launch takes of an H100."""
    kernel, programs = compiled(launch), launch.grid[0] * launch.grid[1]
    used, shared = resources(kernel), kernel.metadata.shared
    blocks = resident(used["reg"], launch.options["num_warps"], shared)
    waves = programs / blocks / MULTIPROCESSORS
    switches = [name for name, on in constants(launch).items() if on and len(name) > 2]
    return {
        "kernel": launch.kernel.__name__, "switches": " ".join(switches), "launches": 0,
        "mbytes": sum(t.nbytes for t in {id(t): t for t in tensors(launch)}.values()) / 1e6,
        "programs": programs, "registers": used["reg"], "shared_kib": shared / 1024,
        "spilled_bytes": used["stack"] + used["local"], "blocks": blocks, "waves": waves,
        "idle_percent": 100 * (1 - waves / math.ceil(waves)),
    }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """Step to analyse."""

    model: Annotated[Positional[str], arg(metavar="MODEL")] = "tresnet_m"
    """Name of the model."""
    batch_size: int = 256
    """Images of a step, of 224 x 224 pixels."""
    output_dir: Path = Path("benchmarks/records")
    """Directory of the record."""


def main(options: Options) -> None:
    """Print a row for each kernel and grid, most bytes first, and write the record."""
    compile_for(90)
    rows: dict[Any, dict[str, Any]] = {}
    for launch in noted_step(options.model, options.batch_size):
        sizes = tuple(t.shape for t in tensors(launch))
        key = launch.kernel, launch.grid, sizes, tuple(constants(launch).items())
        rows[key] = rows.get(key) or row(launch)
        rows[key]["launches"] += 1
    ordered = sorted(rows.values(), key=lambda row: -row["mbytes"] * row["launches"])
    cells = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in r.values()] for r in ordered]
    say(format_table(list(ordered[0]), cells))
    settings = {"model": options.model, "batch_size": options.batch_size, "target": "sm_90"}
    record = RecordFile(options.output_dir, "kernels", device=None, settings=settings)
    say(f"record: {record.write(ordered)}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
