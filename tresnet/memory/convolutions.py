"""The convolutions of a step, taken from its trace and run one by one to see what cuDNN borrows.

The result is the table that `tresnet.memory.workspaces.Workspaces` reads: bytes by convolution.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tresnet.errors import InputError
from tresnet.memory.device import GENERIC, mib
from tresnet.memory.plan import Plan
from tresnet.memory.prediction import record
from tresnet.memory.workspaces import CONVOLUTIONS, Workspaces, convolution_key

# The first run of a shape may search among kernels, the second is like all later ones.
_RUNS = 2


@dataclass(frozen=True)
class _Operand:
    """A tensor's form, without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Convolution:
    """One convolution, forward or backward, with forms in place of tensors."""

    key: str
    func: Any
    arguments: tuple

    def prepare(self, device: torch.device | str) -> Callable[[], Any]:
        """Make the tensors; the function returned runs the convolution on them."""
        made = [
            torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device=device).zero_()
            if isinstance(a, _Operand)
            else a
            for a in self.arguments
        ]
        return torch.no_grad()(lambda: self.func(*made))


@dataclass(frozen=True)
class _Collector(Workspaces):
    """Keeps the convolutions it is asked about, and says that they borrow nothing."""

    found: dict[str, Convolution] = field(default_factory=dict)

    def of(self, func: Any, args: tuple, outputs: list[torch.Tensor]) -> tuple[int, int]:
        if func in CONVOLUTIONS:
            key = convolution_key(func, args)
            forms = (
                _Operand(tuple(a.shape), a.stride(), a.dtype) if isinstance(a, torch.Tensor) else a
                for a in args
            )
            self.found.setdefault(key, Convolution(key, func, tuple(forms)))
        return 0, 0


def collect(model: nn.Module, plan: Plan) -> dict[str, Convolution]:
    """The distinct convolutions of one step, by the key that `Workspaces` looks them up with.

    Raises:
        InputError: as for `tresnet.memory.prediction.record`.
    """
    collector = _Collector()
    record(model, plan, GENERIC, collector, steps=1)
    return collector.found


def measure_all(
    convolutions: Iterable[Convolution],
    meter: Callable[[Convolution], int],
    time_limit_s: float,
) -> tuple[dict[str, int], dict[str, str]]:
    """Bytes borrowed by each convolution, and why others have none.

    Args:
        convolutions: what to run.
        meter: runs one and says what it borrowed.
        time_limit_s: after this no further one is begun.
    """
    end_s = time.monotonic() + time_limit_s
    table: dict[str, int] = {}
    unmeasured: dict[str, str] = {}
    for convolution in convolutions:
        if time.monotonic() >= end_s:
            unmeasured[convolution.key] = "no time was left"
            continue
        try:
            table[convolution.key] = meter(convolution)
        except RuntimeError as error:  # out of memory, or no kernel for it
            unmeasured[convolution.key] = (str(error).strip() or "no message").splitlines()[0]
    return table, unmeasured


def cuda_meter(device: torch.device, *, benchmark: bool) -> Callable[[Convolution], int]:
    """A meter that runs convolutions on a GPU and reads the caching allocator's peak.

    Args:
        device: the GPU.
        benchmark: let cuDNN try its kernels, as `torch.backends.cudnn.benchmark` does; what the
            search borrows counts.

    Raises:
        InputError: the device is no GPU, or there is none.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        got = f"got device {device}" if device.type != "cuda" else "found none"
        raise InputError(
            f"expected a GPU to measure cuDNN's workspaces on, {got}: run this on a machine with "
            "one, then predictions anywhere can use the table"
        )

    def meter(convolution: Convolution) -> int:
        torch.cuda.empty_cache()
        run = convolution.prepare(device)
        tf32 = torch.backends.cudnn.allow_tf32
        with torch.backends.cudnn.flags(enabled=True, benchmark=benchmark, allow_tf32=tf32):
            return max(_borrowed_bytes(run, device) for _ in range(_RUNS))

    return meter


def _borrowed_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """The peak during a run beyond what is held after it, its outputs included."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    outputs = run()
    torch.cuda.synchronize(device)
    held = torch.cuda.memory_allocated(device)
    del outputs
    return torch.cuda.max_memory_allocated(device) - held


def summarise(table: dict[str, int]) -> str:
    """How many convolutions borrow, and which the most."""
    borrowing = [key for key, n_bytes in table.items() if n_bytes]
    line = f"{len(table)} convolutions measured, {len(borrowing)} borrow memory"
    if not borrowing:
        return line
    most = max(borrowing, key=lambda key: table[key])
    return f"{line}, at most {mib(table[most])}: {most}"
