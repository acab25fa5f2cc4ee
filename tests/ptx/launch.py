"""A stand-in for `tresnet.ops.launching.launch` that runs compiled kernels on CPU tensors.

    TRITON_INTERPRET=0 PTX_TARGET=90 python -m pytest -p tests.ptx.launch tests/ops/test_pool.py

As a plugin of pytest, it lets the tests of `tresnet.ops` run what Triton compiles for a GPU of this
compute capability. PTX_FAULT, a pattern and what replaces it in the PTX, puts a fault into kernels.
"""

import ctypes
import math
import os
import re

import numpy as np
from torch import Tensor

from benchmarks.kernel_table import compile_for, compiled
from tests.ptx.machine import Machine
from tests.ptx.memory import APART, Region
from tests.ptx.parse import Program, parse
from tresnet.ops import dispatch, launching, pool, stem
from tresnet.ops.epilogue import passes
from tresnet.ops.launching import Launch, LaunchSpec
from tresnet.ops.render import launch as render_launch

LANES = 4096  # of a machine, or of its only program
programs: dict[str, Program] = {}  # by their text


def launch(spec: LaunchSpec, **tensors: Tensor | None) -> None:
    """Run a kernel on CPU tensors, as `tresnet.ops.launching.launch` does on a GPU."""
    one = Launch(spec.kernel, spec.grid, spec.options, tensors | spec.scalars)
    for record in launching._records:
        record.append(one)
    if type(out := [*tensors.values()][-1]) in launching._PLAIN and not out.is_meta:
        run(one)


def run(one: Launch) -> None:
    """Compile a kernel, and run its programs."""
    regions: dict[int, Region] = {}  # by the tensors' addresses
    for name, value in one.arguments.items():
        if isinstance(value, Tensor):
            at = value.data_ptr()
            content = np.ctypeslib.as_array((ctypes.c_uint8 * value.nbytes).from_address(at))
            regions.setdefault(at, Region(name, content, value.itemsize, at % 16))
    addresses = {at: APART * n + regions[at].begin for n, at in enumerate(regions, 1)}

    kernel = compiled(one)
    text, kinds = kernel.asm["ptx"], kernel.src.signature
    pattern, _, by = os.environ.get("PTX_FAULT", "").partition(" -> ")
    while pattern and (faulty := re.sub(pattern, by, text)) != text:
        text = faulty
    program = programs[text] = programs.get(text) or parse(text, kernel.metadata.shared)
    parameters = [
        addresses[value.data_ptr()] if isinstance(value, Tensor)
        else int(np.float32(value).view(np.uint32)) if kinds[name].startswith("fp")
        else int(value) % 2**64
        for name, value in one.arguments.items() if kinds[name] != "constexpr"
    ]  # fmt: skip
    parameters += [0] * (len(program.parameters) - len(parameters))  # scratch memory, not used
    count = math.prod(one.grid)
    for ids in np.array_split(np.arange(count), -(-count * program.threads // LANES)):
        Machine(program, [*regions.values()], parameters, ids, one.grid).run()


def pytest_configure() -> None:
    compile_for(int(os.environ["PTX_TARGET"]))
    dispatch.interpreted = lambda: True
    for module in (launching, passes, pool, stem, render_launch):
        module.launch = launch
