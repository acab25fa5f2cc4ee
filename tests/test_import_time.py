"""Importing the package, and building a model, is quick and leaves the GPU alone."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_MS = 100.0
RUNS = 5
LAZY = {
    *("timm", "torchvision", "triton", "inplace_abn", "sklearn", "PIL", "safetensors"),
    *("huggingface_hub", "tyro", "tqdm", "pynvml", "tensorboard"),
}


def run(code: str) -> str:
    """Standard output of Python code in a process of its own, warnings being errors."""
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    return result.stdout


TIMED = """
import time
import torch
start = time.perf_counter()
import tresnet
print((time.perf_counter() - start) * 1e3)
"""


def test_import_costs_little_beyond_torch():
    """The least of a few runs: what else the machine does only ever adds to the time."""
    times_ms: list[float] = []
    while len(times_ms) < RUNS and min(times_ms, default=LIMIT_MS + 1) > LIMIT_MS:
        times_ms.append(float(run(TIMED)))
    assert min(times_ms) <= LIMIT_MS, f"import tresnet took {times_ms} ms beyond torch"


def test_import_leaves_other_packages_alone():
    added = run(
        "import sys, torch; a = set(sys.modules); import tresnet; print(*set(sys.modules) - a)"
    )
    assert {name.split(".")[0] for name in added.split()} & LAZY == set()


NO_CUDA = """
import torch

def refuse(*args, **kwargs):
    raise AssertionError("CUDA was touched")

torch.cuda._lazy_init = torch._C._cuda_init = torch._C._cuda_getDeviceCount = refuse
torch.cuda.is_available = torch.cuda.device_count = refuse
"""


def test_construction_never_touches_cuda_nor_loads_the_compiler():
    """Loading torch._dynamo takes as long as loading the rest of PyTorch."""
    out = run(f"""{NO_CUDA}
import sys, tresnet
tresnet.list_models()
tresnet.create("tresnet_t")
print("torch._dynamo" in sys.modules)
tresnet.create("tresnet_m", device="meta")
tresnet.create("tresnet_t", norm="batchnorm", jit=True)
try:
    torch.zeros(1, device="cuda")
except AssertionError as error:
    print(error)
""")
    assert out.splitlines() == ["False", "CUDA was touched"]
