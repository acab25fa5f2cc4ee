"""Meter of a run's set-up: searching algorithms, compiling, capturing CUDA graphs.

Set-up takes from seconds to minutes, and more memory than a step. The rates and
peaks of training leave it out, so its own are printed once and logged in a column of their own.
"""

import time
from collections.abc import Callable

import torch

from tresnet.measure.memory_meter import MemoryMeter
from tresnet.settings import Compute


class SetUpMeter:
    """Meter of the time and peak memory of those micro-batches that are set-up.

    Call `begin()` before each micro-batch, and `end(setting_up)` after it. After a period of
    set-up, unused memory is returned to the GPU, and `say` gets a message with time and peak.
    """

    def __init__(self, memory: MemoryMeter, compute: Compute, say: Callable[[str], object]) -> None:
        self._memory, self._say = memory, say
        compiles, on_gpu = compute.compile != "none", memory.device.type == "cuda"
        parts = {
            "searching convolution algorithms": on_gpu and torch.backends.cudnn.benchmark,
            "compiling the model": compiles,
            "compiling kernels": on_gpu and not compiles,
            "capturing the step": on_gpu and compute.cuda_graph != "off",
        }
        what = ", ".join(part for part, happens in parts.items() if happens)
        # Measured on an H200: 13 to 39 s, and 120 s with Inductor (docs/benchmarks.md).
        duration = "minutes" if compiles else "10 to 60 s"
        self._announcement = what and f"set-up: {what}; {duration} on first use"
        self._began_s = self._period_s = self._epoch_s = 0.0
        self._peak_mib = 0.0
        self._was_set_up = False

    def begin(self) -> None:
        """Begin a micro-batch; after one of set-up, store and reset the peak of memory."""
        if self._announcement:
            self._say(self._announcement)
            self._announcement = ""
        if self._was_set_up:
            self._peak_mib = max(self._peak_mib, self._memory.snapshot().peak_mib or 0.0)
            self._memory.reset_peak()
        self._began_s = time.perf_counter()

    def end(self, setting_up: bool) -> None:
        """End a micro-batch; `setting_up` says whether it was set-up."""
        if setting_up:
            self._period_s += time.perf_counter() - self._began_s
        elif self._was_set_up:
            torch.cuda.empty_cache()  # a no-op where CUDA is not initialised
            self._say(
                f"set-up took {self._period_s:.1f} s, with a peak of {self._peak_mib:.0f} MiB;"
                " images/s and memory of training leave it out"
            )
            self._epoch_s += self._period_s
            self._period_s = self._peak_mib = 0.0
        self._was_set_up = setting_up

    def take_epoch_s(self) -> float | None:
        """Return the seconds of set-up since the last call; None if there was no set-up."""
        seconds = self._epoch_s + self._period_s
        self._epoch_s = -self._period_s  # the period may continue in the next epoch
        return seconds or None
