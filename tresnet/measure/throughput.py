"""Meter of images per second that does not slow down the measured loop, and its clocks.

Clocks measure the time between two marks, without waiting for the device at a mark. On CUDA a mark
is an event in the current stream, which costs microseconds and no synchronisation, and the time
between two events is GPU time. On a CPU a mark is the value of `time.perf_counter`.
"""

import collections
import itertools
import time
from typing import Any, NamedTuple

import numpy as np
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


class _Step(NamedTuple):
    images: int
    begin: Mark
    ready: Mark
    end: Mark


class ThroughputMeter:
    """Meter of images per second over the last `window` steps of a training or evaluation loop.

    Call `start()` before the loop. In each step, call `data_ready()` when the batch has arrived,
    and `step(images)` at the end. `images_per_s` covers the steps that the GPU has finished, and
    does not wait. `mean_images_per_s` waits for the GPU: call it once per epoch.
    """

    def __init__(
        self, device: torch.device | str, window: int = 50, clock: HostClock | None = None
    ) -> None:
        self._clock = clock or clock_for(torch.device(device))
        self._window = window
        self.reset()

    def reset(self) -> None:
        """Drop all steps, for example before an epoch; call `start()` afterwards."""
        self._steps: collections.deque[_Step] = collections.deque()
        self._older = np.zeros(3)  # sums of `_figures` of the steps before the window
        self._begin: Mark | None = None
        self._ready: Mark | None = None

    def start(self) -> None:
        """Start the clock, before the loop and after each pause such as evaluation."""
        self._begin, self._ready = self._clock.mark(), None

    def data_ready(self) -> None:
        """Mark the arrival of the step's batch: until this call, the step waited for data."""
        self._ready = self._clock.mark()

    def step(self, images: int) -> None:
        """End a step of `images` images, whose work may still be queued, and begin the next step.

        If `start()` was not called, the first call only begins a step and counts nothing.
        """
        end = self._clock.mark()
        if self._begin is not None:
            ready = self._begin if self._ready is None else self._ready
            self._steps.append(_Step(images, self._begin, ready, end))
        if len(self._steps) > self._window:
            oldest = self._steps.popleft()
            # The host waits only if it is a whole window of steps ahead of the GPU.
            self._clock.wait(oldest.end)
            self._older += self._figures(oldest)
        self._begin, self._ready = end, None

    def images_per_s(self) -> float | None:
        """Return images per second of the window's finished steps; None if no step has finished."""
        images, elapsed_s, _ = self._finished()
        return images / elapsed_s if elapsed_s > 0 else None

    def data_wait_fraction(self) -> float | None:
        """Return the fraction of time that the window's finished steps spent waiting for data."""
        _, elapsed_s, work_s = self._finished()
        return 1 - work_s / elapsed_s if elapsed_s > 0 else None

    def mean_images_per_s(self, exclude_data_wait: bool = False) -> float | None:
        """Wait for the GPU; return the mean since `reset`, with or without waits for data."""
        if self._steps:
            self._clock.wait(self._steps[-1].end)
        images, *times_s = (self._older + self._finished()).tolist()
        spent_s = times_s[exclude_data_wait]
        return images / spent_s if spent_s > 0 else None

    def _figures(self, step: _Step) -> np.ndarray:
        """Return the number of images, the step's seconds, and its seconds since `data_ready`."""
        elapsed_s = self._clock.seconds(step.begin, step.end)
        return np.array([step.images, elapsed_s, self._clock.seconds(step.ready, step.end)])

    def _finished(self) -> list[float]:
        steps = itertools.takewhile(lambda step: self._clock.reached(step.end), self._steps)
        return sum(map(self._figures, steps), np.zeros(3)).tolist()
