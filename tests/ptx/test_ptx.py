"""Tests of kernels, run as PTX: as what Triton compiles for GPUs that this machine lacks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
CHOSEN = {
    "epilogue": "tests/ops/test_epilogue.py -k (odd and (blur_se or se_join)) or chain3 or chain6",
    "chains": "tests/ops/test_epilogue.py -k odd and (abn or identity or negative or -join)",
    "pool": "tests/ops/test_pool.py",
    "render": "tests/ops/test_render.py -k resized or affine or window",
}


def run(tests: str, target: int, fault: str = "") -> subprocess.CompletedProcess:
    """Run tests of kernels in a process whose kernels are compiled for a compute capability."""
    path, _, expression = tests.partition(" -k ")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "tests.ptx.launch",
        "-p",
        "no:xdist",
    ]
    command += ["-p", "no:cacheprovider", path, *(["-k", expression] if expression else [])]
    own = {
        "TRITON_INTERPRET": "0",
        "PTX_TARGET": str(target),
        "PTX_FAULT": fault,
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | own, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("target", [80, 90, 120])
@pytest.mark.parametrize("chosen", CHOSEN)
def test_compiled_kernels_compute_what_their_definitions_do(chosen, target):
    done = run(CHOSEN[chosen], target)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "tests"),
    [
        ("no barrier", "tests/ops/test_epilogue.py -k odd and negative"),
        ("no mask", "tests/ops/test_pool.py"),
        ("fma", "tests/ops/test_render.py -k affine"),
        ("no wait", "tests/ops/test_epilogue.py -k odd and blur_se"),
    ],
)
def test_a_fault_in_a_kernel_is_seen(fault, tests):
    done = run(tests, 90, fault)
    assert done.returncode == 1, done.stdout + done.stderr
    seen = "outside|FaultError|off by|not equal|AssertionError"
    assert any(word in done.stdout for word in seen.split("|"))
