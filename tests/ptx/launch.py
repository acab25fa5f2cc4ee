"""A stand-in for `tresnet.ops.launching.launch` that runs compiled kernels on CPU tensors.

    TRITON_INTERPRET=0 PTX_TARGET=90 python -m pytest -p tests.ptx.launch tests/ops/test_pool.py

As a plugin of pytest, it lets the tests of `tresnet.ops` run what Triton compiles for a GPU of this
compute capability. A fault, named by PTX_FAULT, shows that they would see it.
"""

import os
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernel_table import compile_for
from tests.ptx.machine import Machine
from tests.ptx.memory import APART, Region
from tests.ptx.parse import FaultError, Program, parse
from tresnet.ops import dispatch, launching, pool, stem
from tresnet.ops.epilogue import passes
from tresnet.ops.launching import Launch, LaunchSpec
from tresnet.ops.render import launch as render_launch

AT_ONCE = 64  # programs of a machine
FAULTS = {  # what is replaced in a kernel's text
    "no barrier": (r"bar\.sync\s+0;", ""),
    "no mask": (r"@%p\d+ (ld\.global)", r"\1"),
    "fma": (  # an addition and the product before it, of which no register is written again
        r"(?s)(mul\.rn\.(f32|f64)\s+(%\w+), (\S+), (\S+);.*?)"
        r"add\.rn\.\2\s+(%\w+), (?:\3, (\S+)|(\S+), \3);",
        r"\1fma.rn.\2 \6, \4, \5, \7\8;",
    ),
    "no wait": (r"cp\.async\.wait_group\s+\d;", "cp.async.wait_group 99;"),
}
programs: dict[str, Program] = {}  # by their text


def launch(spec: LaunchSpec, **tensors: Tensor | None) -> None:
    """Run a kernel on CPU tensors, as `tresnet.ops.launching.launch` does on a GPU."""
    for record in launching._records:
        record.append(Launch(spec.kernel, spec.grid, spec.options, tensors | spec.scalars))
    if type(out := [*tensors.values()][-1]) in launching._PLAIN and not out.is_meta:
        run(spec.kernel, spec.grid, spec.options, tensors | spec.scalars)


def run(
    kernel: Any, grid: tuple[int, ...], options: dict[str, Any], values: dict[str, Any]
) -> None:
    """Compile a kernel and run it twice, in both orders of warps, which must compute equal bits."""
    regions: dict[int, Region] = {}  # by the tensors' addresses
    for name, value in values.items():
        if isinstance(value, Tensor):
            begin = value.data_ptr() % 16
            region = Region(name, flat(value), value.itemsize, begin)
            regions.setdefault(value.data_ptr(), region)
    addresses = {at: APART * n + regions[at].begin for n, at in enumerate(regions, 1)}

    def pointer(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return SimpleNamespace(dtype=value.dtype, data_ptr=lambda: addresses[value.data_ptr()])

    compiled = kernel.warmup(*map(pointer, values.values()), grid=grid, **options)
    text, kinds = compiled.asm["ptx"], compiled.src.signature
    if fault := os.environ.get("PTX_FAULT"):
        text = re.sub(*FAULTS[fault], text)
    program = programs[text] = programs.get(text) or parse(text)
    parameters = [
        addresses[value.data_ptr()] if isinstance(value, Tensor)
        else int(np.float32(value).view(np.uint32)) if kinds[name].startswith("fp")
        else int(value) % 2**64
        for name, value in values.items() if kinds[name] != "constexpr"
    ]  # fmt: skip
    parameters += [0] * (len(program.parameters) - len(parameters))  # scratch memory, not used
    places = np.stack(np.unravel_index(np.arange(np.prod(grid)), grid, order="F"), 1)
    before, results = [region.values.copy() for region in regions.values()], []
    for reverse in (False, True):
        for region, content in zip(regions.values(), before, strict=True):
            region.values[:] = content
            region.forget()
        for begin in range(0, len(places), AT_ONCE):
            part, shared = places[begin : begin + AT_ONCE], compiled.metadata.shared
            machine = Machine(program, [*regions.values()], parameters, shared, part, grid)
            machine.run(reverse)
        results.append([region.values.tobytes() for region in regions.values()])
    if results[0] != results[1]:
        raise FaultError("warps in another order compute something else")


def flat(x: Tensor) -> np.ndarray:
    """Return the memory of a tensor without gaps, as bytes that can be written."""
    assert x.numel() == 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    content = torch.empty(0, dtype=torch.uint8)
    content.set_(x.untyped_storage(), x.storage_offset() * x.itemsize, (x.nbytes,))
    return content.numpy()


def pytest_configure() -> None:
    compile_for(int(os.environ["PTX_TARGET"]))
    dispatch.interpreted = lambda: True
    for module in (launching, passes, pool, stem, render_launch):
        module.launch = launch
