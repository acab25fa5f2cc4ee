"""Points in time on a device, taken without waiting and compared later.

On CUDA a mark is an event in the current stream. The time between two marks is then GPU time, and a
mark costs microseconds and no synchronisation. Elsewhere a mark is a reading of
`time.perf_counter`.
"""

import time
from collections.abc import Callable, Sequence
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


Calls = Sequence[Callable[[], object]]
# Clock cycles: a few ms to begin with, about half a second at most.
_FIRST_CYCLES, _MOST_CYCLES = 2**23, 2**30


class HeldClock:
    """Times blocks of a few short calls on one device, without the host's overhead.

    A kernel of a few microseconds ends before Python has queued the next one, so plain timing would
    measure Python. On a GPU the calls are queued behind a waiting kernel, and then run back to
    back. On a CPU they are timed directly. `late_blocks` counts blocks that the host could not
    queue in time; their time includes the host's.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock, self._on_gpu = clock_for(device), device.type == "cuda"
        self._cycles = _FIRST_CYCLES
        self.late_blocks = 0

    def seconds_per_call(self, prepare: Callable[[], Calls]) -> float:
        """Return the mean time of the calls of one block.

        Results live until the block ends, so that each call writes other memory. `prepare` makes
        the calls, untimed; it is called again if the host was too slow.
        """
        while True:
            calls = prepare()
            if self._on_gpu:
                torch.cuda.synchronize()
                torch.cuda._sleep(self._cycles)
            begin = self._clock.mark()
            results = [call() for call in calls]
            late = self._on_gpu and self._clock.reached(begin)
            end = self._clock.mark()
            self._clock.wait(end)
            if late and self._cycles < _MOST_CYCLES:
                self._cycles *= 2
                continue
            self.late_blocks += late
            return self._clock.seconds(begin, end) / len(results)
