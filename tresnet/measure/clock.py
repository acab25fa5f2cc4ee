"""Points in time on a device, taken without waiting and compared later.

On CUDA a mark is an event in the current stream. The time between two marks is then GPU time, and a
mark costs microseconds and no synchronisation. Elsewhere a mark is a reading of
`time.perf_counter`.
"""

import time
from typing import Any

import torch

# The result of mark(), opaque to callers: a float or a torch.cuda.Event.
Mark = Any


class HostClock:
    """Marks are seconds of the host's monotonic clock."""

    def mark(self) -> Mark:
        """Return this point in time, in the order of the device's work."""
        return time.perf_counter()

    def reached(self, mark: Mark) -> bool:
        """Return whether the device has reached `mark`; never waits."""
        return True

    def wait(self, mark: Mark) -> None:
        """Wait until the device has reached `mark`."""

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Return seconds from one mark to another; the device must have reached both."""
        return end - begin


class CudaClock(HostClock):
    """Marks are timing events of the device's current stream; their resolution is about 0.5 us."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Mark:
        """Return an event behind all work queued so far in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def reached(self, mark: Mark) -> bool:
        """Return whether the GPU has passed the event."""
        return mark.query()

    def wait(self, mark: Mark) -> None:
        """Wait for the event."""
        mark.synchronize()

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Return the GPU time between events."""
        return begin.elapsed_time(end) / 1000


def clock_for(device: torch.device) -> HostClock:
    """Return the clock that measures work on `device`."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
