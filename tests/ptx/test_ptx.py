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
FAULTS = {  # and tests of which one must see it
    "no barrier": "odd-negative",
    "no mask": "test_pool",
    "fma": "affine",
    "no wait": "odd-blur_se",
}


def run(tests: str, target: int, fault: str = "") -> subprocess.CompletedProcess:
    """Run tests of kernels in a process whose kernels are compiled for a compute capability."""
    plugins = "-ptests.ptx.launch", "-pno:xdist", "-pno:cacheprovider"
    files = [f"tests/ops/test_{name}.py" for name in ("epilogue", "pool", "render")]
    command = [sys.executable, "-m", "pytest", "-qx", *plugins, *files, "-k", tests]
    own = {"TRITON_INTERPRET": "0", "PTX_TARGET": str(target), "PTX_FAULT": fault}
    environment = os.environ | own | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("target", [80, 90, 120])
def test_compiled_kernels_compute_what_their_definitions_do(target):
    done = run(CHOSEN, target)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_kernel_is_seen(fault):
    done = run(FAULTS[fault], 90, fault)
    assert done.returncode == 1, done.stdout + done.stderr
    seen = "outside|FaultError|off by|not equal|AssertionError"
    assert any(word in done.stdout for word in seen.split("|"))
