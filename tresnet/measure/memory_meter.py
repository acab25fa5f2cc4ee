"""Meter of the memory of PyTorch's allocator and of the device in each phase of a run.

The columns and the phases (initial, model, train, final) are those of the study "GPU memory usage
for deep learning image processing". On a CPU the only column is the process's peak resident memory.
"""

import contextlib
import functools
import sys
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from tresnet import devices

Phase = Literal["initial", "model", "train", "final"]
_OUT_OF_MEMORY_SIGNS = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "STATUS_ALLOC_FAILED",
)


class MemorySnapshot(NamedTuple):
    """Memory at one moment, in bytes. None means unknown or not applicable, never zero bytes.

    `max_allocated` is the peak since `MemoryMeter.reset_peak()`, including the memory pools of CUDA
    graphs. `device_used` is the memory used by all processes, from NVML. `rss_peak` is this
    process's peak resident memory, or None on a CUDA device.
    """

    allocated: int | None = None
    reserved: int | None = None
    max_allocated: int | None = None
    device_used: int | None = None
    rss_peak: int | None = None

    @property
    def peak_mib(self) -> float | None:
        """Peak in MiB: `max_allocated` on a GPU, `rss_peak` on a CPU."""
        return to_mib(self.max_allocated if self.rss_peak is None else self.rss_peak)

    def to_dict(self) -> dict[str, float | None]:
        """Return the five columns in MiB for a row of a log; unknown values are None."""
        return {f"{name}_mib": to_mib(value) for name, value in self._asdict().items()}

    def format(self) -> str:
        """Return the known columns in one line: `allocated 97.8 MiB, reserved 604.0 MiB`."""
        columns = [
            f"{name.removesuffix('_mib').replace('_', ' ')} {value:.1f} MiB"
            for name, value in self.to_dict().items()
            if value is not None
        ]
        return ", ".join(columns) if columns else "memory unknown"


class MemoryMeter:
    """Meter of one device's memory, which stores one snapshot per phase."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.phases: dict[str, MemorySnapshot] = {}

    @functools.cached_property
    def _handle(self) -> object | None:
        return devices.nvml_handle(self.device)

    def reset_peak(self) -> None:
        """Reset the peaks: `max_allocated` on CUDA, `rss_peak` on a CPU if Linux allows it."""
        if self.device.type == "cuda":
            torch.cuda.init()
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            reset_peak_rss()

    def snapshot(self) -> MemorySnapshot:
        """Read the memory now, without waiting for queued GPU work."""
        if self.device.type != "cuda":
            return MemorySnapshot(rss_peak=peak_rss_bytes())
        peak = torch.cuda.max_memory_allocated(self.device) + unused_pool_bytes(self.device)
        return MemorySnapshot(
            allocated=torch.cuda.memory_allocated(self.device),
            reserved=torch.cuda.memory_reserved(self.device),
            max_allocated=min(peak, torch.cuda.max_memory_reserved(self.device)),
            device_used=devices.device_used_bytes(self._handle),
        )

    def phase(self, name: Phase) -> MemorySnapshot:
        """Take and store the snapshot of a phase; phase `initial` first resets the peaks."""
        if name == "initial":
            self.reset_peak()
        self.phases[name] = self.snapshot()
        return self.phases[name]


def unused_pool_bytes(device: torch.device) -> int:
    """Return the bytes that the memory pools of CUDA graphs hold beside their allocated tensors.

    A capture allocates the tensors of a step in a pool, and frees them. Replays write to the freed
    memory without an allocation, and nothing else may use it. PyTorch's counters of allocated bytes
    therefore omit this memory, although it is in use.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return 0  # cudaMallocAsync describes no segments
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and segment["segment_pool_id"] != (0, 0)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception of PyTorch, its libraries or Python reports full memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(sign in str(error) for sign in _OUT_OF_MEMORY_SIGNS)


def failure_in_short(error: Exception) -> str:
    """Return an error's type and first line; omit uninformative types such as RuntimeError."""
    lines, kind = str(error).strip().splitlines(), type(error)
    if not lines:
        return kind.__name__
    of_library = isinstance(error, RuntimeError | MemoryError) or any(
        base.__module__.startswith("triton.") for base in kind.__mro__
    )
    return lines[0] if of_library else f"{kind.__name__}: {lines[0]}"


def to_mib(count_bytes: int | None) -> float | None:
    """Convert bytes to MiB (2**20 bytes); return None for None."""
    return None if count_bytes is None else count_bytes / devices.MIB


def peak_rss_bytes() -> int | None:
    """Return the peak resident memory of this process in bytes, or None if unknown.

    On Linux, VmHWM is read, because a process inherits ru_maxrss from a larger parent process.
    ru_maxrss is in bytes on macOS, and in KiB on other systems.
    """
    with contextlib.suppress(OSError, IndexError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    try:
        import resource
    except ImportError:
        return None
    maxrss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return maxrss if sys.platform == "darwin" else maxrss * 1024


def reset_peak_rss() -> None:
    """Reset this process's peak resident memory on Linux; do nothing on other systems."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
