"""Clocks that measure the time between two marks, without waiting for the device at a mark.

On CUDA a mark is an event in the current stream, which costs microseconds and no synchronisation.
The time between two events is GPU time. On a CPU a mark is the value of `time.perf_counter`.
"""

import time
from typing import Any

import torch

# Result of `mark()`: a float or a torch.cuda.Event.
Mark = Any


class HostClock:
    """Clock whose marks are values of `time.perf_counter`."""

    def mark(self) -> Mark:
        """Return a mark of the present time."""
        return time.perf_counter()

    def reached(self, mark: Mark) -> bool:
        """Return without waiting whether the device has reached `mark`."""
        return True

    def wait(self, mark: Mark) -> None:
        """Wait until the device has reached `mark`."""

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Return the seconds from `begin` to `end`; the device must have reached both marks."""
        return end - begin


class CudaClock(HostClock):
    """Clock whose marks are CUDA timing events, with a resolution of about 0.5 us."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Mark:
        """Record and return an event in the current stream, after all work queued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def reached(self, mark: Mark) -> bool:
        return mark.query()

    def wait(self, mark: Mark) -> None:
        mark.synchronize()

    def seconds(self, begin: Mark, end: Mark) -> float:
        return begin.elapsed_time(end) / 1000


def clock_for(device: torch.device) -> HostClock:
    """Return the clock that measures work on `device`."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
