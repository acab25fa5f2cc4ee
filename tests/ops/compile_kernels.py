"""Compile the kernels as `tresnet.ops.abn.launch` would launch them, for GPUs this machine lacks.

A script, because Triton decides at its import whether it interprets: prints one JSON object a line,
with the kernel, its case and the registers, stack and local memory (bytes) its threads use, the
narrowest of its accesses to memory (bytes), and, on an H100 and where a thread loads eight values
at once, the instructions of its longest loop that loads.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where it is not set

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tresnet.ops import operators
from tresnet.ops.abn import launch
from tresnet.ops.excite import launch as excite_launch
from tresnet.ops.space_to_depth import launch as stem_launch

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
}
# Widths of tresnet_m, l and xl; in contiguous memory the width does not matter.
CHANNELS = {torch.channels_last: (64, 76, 83), torch.contiguous_format: (83,)}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def named(launched: list[Any]) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Launches that `operators.noted` noted, their constants by name."""
    found = []
    for function, tensors, numbers, warps in launched:
        given = dict(zip(function.arg_names, (*tensors, *numbers), strict=True))
        options = {function.arg_names[index]: given.pop(function.arg_names[index])
                   for index in function.constexprs}  # fmt: skip
        found.append((function, tuple(given.values()), {**options, "num_warps": warps}))
    return found


def source_of(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> ASTSource:
    """The specialisation Triton's launcher would choose for these arguments."""
    names = function.arg_names
    values = {**dict(zip(names, args, strict=False)), **options}
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(names):
        value, about = values[name], function.params[index]
        is_one = isinstance(value, int) and value == 1 and not about.do_not_specialize
        looked_at = not (about.do_not_specialize or about.do_not_specialize_on_alignment)
        if about.is_constexpr or is_one:
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            if value.storage_offset() * value.element_size() % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32"
            if value % 16 == 0 and looked_at:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    return ASTSource(function, signature, constants, attributes)


def resources(compiled: Any) -> dict[str, int]:
    """Registers, stack and local bytes of a thread, read off the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    fields = dict(part.split(":") for part in text.split() if part.count(":") == 1)
    return {key.lower(): int(fields[key]) for key in ("REG", "STACK", "LOCAL")}


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
            body = [w for a, w in code if int(target[1], 16) <= a <= at]
            longest = max(longest, len(body) if any("LDG" in w for w in body) else 0)
    return longest


def launches(dtype: torch.dtype, layout: torch.memory_format, channels: int) -> None:
    """Launch every kernel in every combination of its switches that a model uses."""
    x = torch.empty(256, channels, 28, 28, dtype=dtype, device="meta").to(memory_format=layout)
    half = torch.empty(256, channels, 14, 14, dtype=dtype, device="meta").to(memory_format=layout)
    vector = torch.empty(channels, device="meta")
    stats = torch.empty(4, channels, device="meta")
    gate = torch.empty(256, channels, device="meta")
    for per_sample in (False, True):
        launch.statistics(x, vector, vector, vector, 0.1, 1e-5, per_sample, True)
    for blur in (False, True):
        launch.squeeze(x, stats, vector, 1e-3, blur)
        launch.squeeze(x, None, vector, 1e-3, blur)
    for slope, blur, se, join in (
        (1e-3, False, False, False),
        (1e-3, True, False, False),
        (1e-3, False, True, False),
        (1e-3, True, True, False),
        (None, False, False, False),
        (None, False, True, True),
        (None, False, False, True),
    ):
        gates, added = gate if se else None, x if join else None
        grad = half if blur else x
        launch.apply(x, stats, vector, gates, added, slope, blur)
        launch.apply(x, None, vector, gates, added, slope, blur)
        twin = bits = None
        if join:
            twin = grad
            bits = launch.apply(x, stats, vector, gates, added, slope, blur, True)[1]
        sums = grad, twin, x, bits, gates, stats, vector, slope, blur
        partial, _ = launch.grad_sums(*sums)
        if not (blur or join):
            launch.grad_sums(*sums, True)
        if se:
            layers = vector.expand(channels // 2 + 1, channels), vector[: channels // 2 + 1]
            layers += layers[0].t(), vector
            _, hidden, _ = excite_launch.forward(gate, x, stats, vector, join, blur, *layers)
            excite_launch.backward(partial, stats, vector, gate, gate, hidden, *layers, 784)
        launch.merge_grad_sums(partial, gates, gates, stats, 256 * 28 * 28)
        launch.grad_apply(grad, x, stats, vector, gates, gates, stats, slope, blur, True)


def stem_launches(dtype: torch.dtype) -> None:
    """The stem's kernel on bytes, channels last and first."""
    images = torch.empty(8, 3, 224, 224, dtype=torch.uint8, device="meta")
    for layout in (torch.channels_last, torch.contiguous_format):
        stem_launch.stem_input(images.to(memory_format=layout), 4, dtype)


def main(capabilities: list[int], dtypes: list[str]) -> None:
    """Compile every case for each capability (80, 90) and print its resources."""
    warnings.simplefilter("error")
    seen = set()
    for capability in capabilities:
        for name in dtypes:
            dtype = getattr(torch, name)
            with operators.noted() as launched:
                stem_launches(dtype)
                for layout, widths in CHANNELS.items():
                    for channels in widths:
                        launches(dtype, layout, channels)
            for function, args, options in named(launched):
                source = source_of(function, args, options)
                if (capability, source.hash()) in seen:
                    continue
                seen.add((capability, source.hash()))
                target = GPUTarget("cuda", capability, 32)
                compiled = triton.compile(
                    source, target=target, options={"num_warps": options["num_warps"]}
                )
                switches = {k: v for k, v in options.items() if k != "num_warps"}
                row = {"kernel": function.__name__, "dtype": name, "sm": capability, **switches}
                row |= {**resources(compiled), "narrowest": narrowest(compiled)}
                row["threads"] = 32 * options["num_warps"]
                # disassembling takes longer than compiling
                if capability == 90 and options.get("AC") == 8:
                    row["loop"] = longest_loop(compiled)
                sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main([int(value) for value in sys.argv[1].split(",")], sys.argv[2].split(","))
