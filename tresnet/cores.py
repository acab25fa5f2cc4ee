"""Cores that this process may use, and how PyTorch's threads share them with other processes.

Importing this module does not import PyTorch, because OpenMP reads its variables when it is loaded.
"""

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
# OpenMP's threads wait for each other in a loop before they sleep. Beside another busy process the
# loop takes the cores from the thread that all wait for.
_WAITING = {
    "GOMP_SPINCOUNT": "1000",  # iterations, of GCC's OpenMP; 10^5 to 10^10 by default
    "KMP_BLOCKTIME": "1",  # milliseconds, of LLVM's and Intel's OpenMP; 200 by default
}
_SET_BY_USERS = ("OMP_WAIT_POLICY", *_WAITING)


def usable_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and its cgroup."""
    return min([_visible_cores(), *_quotas()])


def _visible_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas() -> list[int]:
    """Return the cgroup's limits of CPU time, in cores rounded up; a container's options set it."""
    quotas = []
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # v2, v1
        try:
            texts = " ".join((_CGROUP / name).read_text(encoding="ascii") for name in names)
            quota_us, period_us = map(int, texts.split())
        except (OSError, ValueError):  # no such file, or `max`: no limit
            continue
        if quota_us > 0 and period_us > 0:  # version 1 writes -1 for no limit
            quotas.append(math.ceil(quota_us / period_us))
    return quotas


def share() -> None:
    """Let OpenMP's threads sleep while they wait, and start no more of them than usable cores.

    What a user has set stays. Call it before the first import of PyTorch.
    """
    if usable_cores() < _visible_cores():  # otherwise PyTorch's own default, the physical cores
        os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))
    if not any(name in os.environ for name in _SET_BY_USERS):
        os.environ.update(_WAITING)
