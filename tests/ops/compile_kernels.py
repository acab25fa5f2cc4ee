"""Compile the kernels as `tresnet.ops` would launch them, for GPUs this machine lacks.

A script, because Triton decides at its import whether it interprets: prints one JSON object a line,
with the kernel, its case and the registers, stack and local memory (bytes) its threads use, the
narrowest of its accesses to memory (bytes), and, on an H100 and where a thread loads eight values
at once, the instructions of its longest loop that loads. Of the layers of SE, it has the numbers of
instructions that say whether they use tensor cores and load ahead.
"""

import json
import re
import subprocess
import sys
import tempfile
import warnings
from typing import Any

import torch

from benchmarks.kernel_table import CUOBJDUMP, compile_for, compiled, resident, resources
from tests.ops.operation import excitation, launch_all
from tresnet.ops import launching, pool, stem
from tresnet.ops.epilogue import Epilogue, forward

# Widths of tresnet_m, l and xl; each kind of alignment once for an A100.
SE_SIZES = (16, 64), (256, 128), (336, 166)  # channels and hidden units of tresnet_t, m and xl
CHANNELS = {"float16": (64, 83, 256), "float32": (76, 83, 256), "bfloat16": (64, 76, 83, 256)}
CHAINS = [
    {"slope": slope, "blur": blur, "se": se, "join": join}
    for slope, blur, se, join in (
        *((1e-3, blur, se, False) for blur in (False, True) for se in (False, True)),
        *((None, False, se, join) for se, join in ((False, False), (True, True), (False, True))),
    )
]


def narrowest(compiled: Any) -> int:
    """Bytes of the narrowest load or store of global memory, single bytes (of bits) left out."""
    hints = r"(?:\.L[12]::\w+)*"
    access = rf"(?:ld|st)\.global{hints}(?:\.v(\d))?\.[bfsu](\d+)"
    accesses = re.findall(access, compiled.asm["ptx"])
    return min(int(count or 1) * int(bits) // 8 for count, bits in accesses if count or bits != "8")


def longest_loop(compiled: Any) -> int:
    """Instructions of a thread in a round of the longest loop that loads from global memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code = [
        (int(at, 16), what) for at, what in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+([^;]+);", text)
    ]
    longest = 0
    for at, what in code:
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", what)
        if target is not None:
            start = int(target[1], 16)
            body = [w for a, w in code if start <= a <= at]
            longest = max(longest, len(body) if any("LDG" in w for w in body) else 0)
    return longest


def of_tensor_cores(ptx: str) -> dict[str, int]:
    """Return numbers of barriers, products and asynchronous loads, and of shuffles in loops."""
    lines = ptx.splitlines()
    labels = {
        label[1]: at for at, line in enumerate(lines) if (label := re.match(r"(\$\S+):", line))
    }
    branches = [(at, re.search(r"\bbra\S*\s+(\$\w+)", line)) for at, line in enumerate(lines)]
    loops = [lines[labels[to[1]] : at] for at, to in branches if to and labels[to[1]] < at]
    shuffles = sum("shfl" in line for body in loops for line in body)
    counts = {"barriers": "bar.sync", "products": "mma.sync", "async": "cp.async.c"}
    return {"shuffles": shuffles, **{name: ptx.count(what) for name, what in counts.items()}}


def launches(dtype: torch.dtype, channels: int) -> None:
    """Launch every kernel in every combination of its switches that a model uses."""
    x = torch.empty(256, channels, 28, 28, dtype=dtype, device="meta")
    x = x.to(memory_format=torch.channels_last)
    bias = torch.empty(channels, device="meta")
    pool.add_avg_pool_grad(x, pool.avg_pool(x))
    for chain in CHAINS:
        launch_all(x, **chain, reduced=64)
        layers = excitation(channels, 64) if chain["se"] else None
        folded = Epilogue(None, bias, slope=chain["slope"], blur=chain["blur"], se=layers)
        forward(x.detach(), folded, shortcut=x.detach() if chain["join"] else None)


def main(capability: int, name: str) -> None:
    """Compile every case for a capability (80, 90) and a dtype, and print its resources."""
    warnings.simplefilter("error")
    compile_for(capability)
    dtype = getattr(torch, name)
    with launching.recorded_launches() as launched:
        images = torch.empty(8, 3, 224, 224, dtype=torch.uint8, device="meta")
        stem.stem_input(images, 4, dtype, kernels=True)
        for channels in CHANNELS[name]:
            launches(dtype, channels)
        for channels, reduced in SE_SIZES:
            x = torch.empty(256, channels, 14, 14, dtype=dtype, device="meta")
            x = x.contiguous(memory_format=torch.channels_last)
            for slope in (None, 1e-3):
                launch_all(x, se=True, join=False, reduced=reduced, slope=slope)
    kernels = {kernel.hash: (kernel, one) for one in launched for kernel in [compiled(one)]}
    for kernel, one in kernels.values():
        switches, warps = one.constants(), one.options["num_warps"]
        row = {"kernel": one.kernel.__name__, "threads": 32 * warps, **switches}
        row |= {**resources(kernel), "narrowest": narrowest(kernel)}
        row["ahead"] = "cp.async" in kernel.asm["ptx"]
        row["blocks"] = resident(row["reg"], warps, kernel.metadata.shared)
        row["shared"] = kernel.metadata.shared
        if "BN" in switches:
            row |= of_tensor_cores(kernel.asm["ptx"])
        # disassembling takes longer than compiling
        if capability == 90 and switches.get("AC") == 8:
            row["loop"] = longest_loop(kernel)
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
