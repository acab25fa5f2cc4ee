#!/usr/bin/env python3
"""List the kernel launches of a step on an H100, with their programs, registers and bytes.

    python3 benchmarks/kernel_table.py tresnet_m --batch-size 256
    python3 benchmarks/kernel_table.py tresnet_m --batch-size 1 --inference

The step trains the model, or runs its folded copy without gradients. No GPU is needed, and nothing
is computed: the step runs on fake tensors, its launches are
collected, and Triton compiles their kernels. Launches of PyTorch's operators are counted too. A
wave is a set of programs that run on the GPU at once. `idle_percent` says how much of all waves the
last, incomplete wave leaves unused. Bytes are the sizes of a launch's tensors, each counted once.
The table is printed, and recorded in benchmarks/records.
"""

import dataclasses
import math
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
import tyro
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from tyro.conf import Positional, arg

import tresnet
from tresnet.cli.output import format_table, say
from tresnet.measure.records import RecordFile
from tresnet.ops import dispatch, launching
from tresnet.surgery import fold

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
# Of an H100: number of multiprocessors; registers, warps and bytes of shared memory of each one.
# CUDA reserves 1 KiB of shared memory for each program besides the memory that the program uses.
MULTIPROCESSORS, REGISTERS, WARPS, SHARED = 132, 65536, 64, 228 * 1024


def compile_for(capability: int) -> None:
    """Let Triton compile for a GPU of this compute capability, without a driver."""
    target = GPUTarget("cuda", capability, 32)
    functions = {"target": lambda: target, "device": lambda: 0, "stream": lambda device: 0}
    stand_in = SimpleNamespace(**{f"get_current_{k}": v for k, v in functions.items()})
    driver.set_active(stand_in)  # pyright: ignore[reportArgumentType]


def compiled(launch: launching.Launch) -> Any:
    """Return a launch's compiled kernel, for pointers aligned as by PyTorch's allocator."""

    def pointer(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return SimpleNamespace(dtype=x.dtype, data_ptr=lambda: x.storage_offset() * x.itemsize)

    arguments = {name: pointer(value) for name, value in launch.arguments.items()}
    return launch.kernel.warmup(**arguments, grid=launch.grid, **launch.options)


def resources(kernel: Any) -> dict[str, int]:
    """Return a thread's registers, and its bytes of stack and local memory, from the cubin."""
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


def tensors(launch: launching.Launch) -> list[Tensor]:
    """Return the tensors among the arguments of a launch."""
    return [value for value in launch.arguments.values() if isinstance(value, Tensor)]


class OperatorLaunches(TorchDispatchMode):
    """Counts the kernels that PyTorch's own operators would launch on a GPU, by operator name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::").removeprefix("prim::")
        if name.startswith("_foreach"):
            lists = [a for a in args if isinstance(a, list | tuple) and isinstance(a[0], Tensor)]
            self.counts[name] += multi_tensor_launches(*lists)
        elif not func.is_view and name not in FREE:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


# Operators that launch no kernel, because they only allocate or describe memory.
FREE = {
    *("device", "empty", "empty_like", "empty_strided", "new_empty"),
    *("detach", "alias", "lift_fresh"),
}
# Limits of PyTorch's multi_tensor_apply: tensors per launch for 1, 2 or 3 lists of tensors, chunks
# per launch, and elements per chunk.
MOST_TENSORS, MOST_CHUNKS, CHUNK = {1: 110, 2: 64, 3: 48}, 320, 65536


def multi_tensor_launches(*lists: Sequence[Tensor]) -> int:
    """Return the number of launches of a multi-tensor operation on a GPU.

    PyTorch handles many tensors in one launch if all are dense, each list has one dtype, and
    corresponding tensors have equal sizes and strides. Otherwise each tensor takes a launch.
    """
    rows = list(zip(*lists, strict=True))
    alike = all(len({(t.shape, t.stride()) for t in row}) == 1 for row in rows)
    dense = all(_is_dense(t) for row in rows for t in row)
    if not (alike and dense and all(len({t.dtype for t in one}) == 1 for one in lists)):
        return len(rows)
    chunks = sum(-(-row[0].numel() // CHUNK) for row in rows)
    return max(-(-len(rows) // MOST_TENSORS[len(lists)]), -(-chunks // MOST_CHUNKS))


def _is_dense(x: Tensor) -> bool:
    used = sorted(
        (stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1
    )
    sizes = [size for _, size in used]
    return all(stride == math.prod(sizes[:at]) for at, (stride, _) in enumerate(used))


def recorded_step(
    name: str, batch: int, inference: bool = False
) -> tuple[list[launching.Launch], Counter[str]]:
    """Return the launches of our kernels in a step, and the launches of each PyTorch operator.

    The images are uint8 and channels_last, and autocast is in bfloat16. With `inference`, batch
    norms are folded, and there is no backward.
    """
    dispatch.interpreted = lambda: True
    model = tresnet.create(name, impl="triton").to(memory_format=torch.channels_last)

    if inference:
        model = fold(model.eval())

    def step() -> None:
        images = torch.empty(batch, 3, 224, 224, dtype=torch.uint8)
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(not inference):
            y = model(images.to(memory_format=torch.channels_last))
        if not inference:
            y.backward(torch.empty_like(y))
            model.zero_grad()

    # Two runs: recorded launches hold gradients, so autograd copies them, which would be counted.
    with FakeTensorMode(allow_non_fake_inputs=True), launching.recorded_launches() as launches:
        step()
    with FakeTensorMode(allow_non_fake_inputs=True), OperatorLaunches() as others:
        step()
    return launches, others.counts


def row(launch: launching.Launch) -> dict[str, Any]:
    """Return the row of the table for one launch on an H100."""
    kernel, programs = compiled(launch), launch.grid[0] * launch.grid[1]
    used, shared = resources(kernel), kernel.metadata.shared
    blocks = resident(used["reg"], launch.options["num_warps"], shared)
    waves = programs / blocks / MULTIPROCESSORS
    switches = [name for name, on in launch.constants().items() if on and len(name) > 2]
    return {
        "kernel": launch.kernel.__name__, "switches": " ".join(switches), "launches": 0,
        "mbytes": sum(t.nbytes for t in {id(t): t for t in tensors(launch)}.values()) / 1e6,
        "programs": programs, "registers": used["reg"], "shared_kib": shared / 1024,
        "spilled_bytes": used["stack"] + used["local"], "blocks": blocks, "waves": waves,
        "idle_percent": 100 * (1 - waves / math.ceil(waves)),
    }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """Model and batch size of the step."""

    model: Annotated[Positional[str], arg(metavar="MODEL")] = "tresnet_m"
    """Name of the model."""
    batch_size: int = 256
    """Number of images in a step; each has 224 x 224 pixels."""
    inference: bool = False
    """Whether the step is inference with folded batch norms, instead of training."""
    output_dir: Path = Path("benchmarks/records")
    """Directory of the record."""


def main(options: Options) -> None:
    """Print a row for each kernel and grid, those with most bytes first, and write the record."""
    compile_for(90)
    rows: dict[Any, dict[str, Any]] = {}
    launches, others = recorded_step(options.model, options.batch_size, options.inference)
    for launch in launches:
        sizes = tuple(t.shape for t in tensors(launch))
        key = launch.kernel, launch.grid, sizes, tuple(launch.constants().items())
        rows[key] = rows.get(key) or row(launch)
        rows[key]["launches"] += 1
    ordered = sorted(rows.values(), key=lambda row: -row["mbytes"] * row["launches"])
    cells = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in r.values()] for r in ordered]
    say(format_table(list(ordered[0]), cells))
    say(
        f"{len(launches)} launches of ours, {others.total()} of PyTorch's operators: {dict(others)}"
    )
    settings = {
        "model": options.model, "batch_size": options.batch_size,
        "inference": options.inference, "target": "sm_90",
        "launches": len(launches), "launches_of_pytorch": dict(others),
    }  # fmt: skip
    record = RecordFile(options.output_dir, "kernels", device=None, settings=settings)
    say(f"record: {record.write(ordered)}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
