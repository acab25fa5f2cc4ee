"""Tests of kernels, run as PTX: as what Triton compiles for GPUs that this machine lacks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
CHOSEN = "odd and (blur_se or se_join or abn or identity or negative or -join) or chain3 or chain6"
CHOSEN += " or wide-abn or 9-65536 or test_pool or resized or affine or window"
FAULTS = {  # tests of which one must see it, and what is replaced in the PTX
    "no barrier": ("odd-negative", r"bar\.sync\s+0; -> "),
    "no mask": ("test_pool", r"@%p\d+ (ld\.global) -> \1"),
    "no wait": ("odd-blur_se", r"cp\.async\.wait_group\s+\d; -> cp.async.wait_group 99;"),
    "fma": (  # an addition and the product before it, of which no register is written again
        "affine",
        r"(?s)(mul(?:\.rn)?\.(f32|f64)\s+(%\w+), (\S+), (\S+);.*?)add(?:\.rn)?\.\2\s+(%\w+), "
        r"(?:\3, (\S+)|(\S+), \3); -> \1fma.rn.\2 \6, \4, \5, \7\8;",
    ),
}


def run(tests: str, target: int, **fault: str) -> subprocess.CompletedProcess:
    """Run tests of kernels in a process whose kernels are compiled for a compute capability."""
    plugins = "-ptests.ptx.launch", "-pno:xdist", "-pno:cacheprovider"
    files = [f"tests/ops/test_{name}.py" for name in ("epilogue", "pool", "render")]
    command = [sys.executable, "-m", "pytest", "-qx", *plugins, *files, "-k", tests]
    own = {"TRITON_INTERPRET": "0", "PTX_TARGET": str(target), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | own | fault, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("target", [80, 90, 120])
def test_compiled_kernels_compute_what_their_definitions_do(target):
    done = run(CHOSEN, target)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_kernel_is_seen(fault):
    tests, replaced = FAULTS[fault]
    done = run(tests, 90, PTX_FAULT=replaced)
    assert done.returncode == 1, done.stdout + done.stderr
    seen = "outside|FaultError|off by|not equal|AssertionError"
    assert any(word in done.stdout for word in seen.split("|"))
