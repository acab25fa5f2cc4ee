"""Points in time on a device: taken without waiting, compared later.

On CUDA a mark is an event in the current stream, so the time between two marks is the time the GPU
took, and taking one costs microseconds and no synchronisation. Elsewhere a mark is a reading of
`time.perf_counter`.
"""

import time
from typing import Any, Protocol

import torch

# What a clock returns from mark() and nobody else looks into: a float or a torch.cuda.Event.
Mark = Any


class Clock(Protocol):
    """Takes marks and tells the seconds between two of them."""

    def mark(self) -> Mark:
        """This point in time, in the order of the device's work."""
        ...

    def reached(self, mark: Mark) -> bool:
        """Whether the device has come to `mark`; never waits."""
        ...

    def wait(self, mark: Mark) -> None:
        """Wait until the device has come to `mark`."""
        ...

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Seconds from one mark to another; the device must have reached both."""
        ...


class HostClock:
    """Marks are seconds of the host's monotonic clock."""

    def mark(self) -> Mark:
        """Seconds now."""
        return time.perf_counter()

    def reached(self, mark: Mark) -> bool:
        """Always: the host is past every mark it took."""
        return True

    def wait(self, mark: Mark) -> None:
        """Nothing to wait for."""

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Difference of the two readings."""
        return end - begin


class CudaClock:
    """Marks are timing events of the device's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Mark:
        """An event behind all work queued so far in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def reached(self, mark: Mark) -> bool:
        """Whether the GPU has passed the event."""
        return mark.query()

    def wait(self, mark: Mark) -> None:
        """Wait for the event."""
        mark.synchronize()

    def seconds(self, begin: Mark, end: Mark) -> float:
        """GPU time from event to event (resolution about 0.5 us)."""
        return begin.elapsed_time(end) / 1000


def clock_for(device: torch.device) -> Clock:
    """The clock that measures work on `device`."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
