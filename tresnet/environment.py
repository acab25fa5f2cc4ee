"""Describe this machine and this package: versions, device, CPU and git commit."""

import importlib.metadata
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tresnet.cores import usable_cores
from tresnet.devices import describe_gpu

__version__ = "0.1.0"  # version of this package
_PACKAGES = ("torch", "torchvision", "timm", "triton", "inplace-abn", "numpy")
_CHECKOUT = Path(__file__).resolve().parent.parent


def describe(device: torch.device | str | int | None = None) -> dict[str, Any]:
    """Return device, CPU, versions and git commit as JSON values, without host name or paths."""
    chosen = torch.device("cpu" if device is None else device)
    return {
        "date_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "tresnet": __version__,
        "git": _git_state(_CHECKOUT),
        "device": describe_gpu(chosen) if chosen.type == "cuda" else {"type": chosen.type},
        "cpu": {
            "model": _cpu_model(),
            "logical_cores": usable_cores(),
            "torch_threads": torch.get_num_threads(),
        },
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: _installed_version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def _cpu_model() -> str | None:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or None


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state(root: Path) -> dict[str, Any] | None:
    top = _output_of("git", "-C", str(root), "rev-parse", "--show-toplevel")
    commit = _output_of("git", "-C", str(root), "rev-parse", "HEAD")
    # None if the package is in another project's repository, because its commit is unrelated.
    if not top or not commit or Path(top).resolve() != root.resolve():
        return None
    changed = _output_of("git", "-C", str(root), "status", "--porcelain")
    dirty = None  # None if `git status` fails or takes over 10 s
    if changed is not None:
        lines = changed.splitlines()
        dirty = any(line[:2] != "??" or line.startswith("?? tresnet/") for line in lines)
    return {"commit": commit, "dirty": dirty}


def _output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
