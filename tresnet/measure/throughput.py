"""Measure images per second of a running loop without slowing the loop down."""

import collections
import dataclasses
import itertools

import torch

from tresnet.measure.clock import HostClock, Mark, clock_for


@dataclasses.dataclass(frozen=True)
class _Step:
    images: int
    begin: Mark
    ready: Mark
    end: Mark


@dataclasses.dataclass
class _Totals:
    images: int = 0
    elapsed_s: float = 0.0
    work_s: float = 0.0

    def add(self, step: _Step, clock: HostClock) -> None:
        self.images += step.images
        self.elapsed_s += clock.seconds(step.begin, step.end)
        self.work_s += clock.seconds(step.ready, step.end)

    def images_per_s(self, exclude_data_wait: bool = False) -> float | None:
        spent_s = self.work_s if exclude_data_wait else self.elapsed_s
        return self.images / spent_s if spent_s > 0 else None


class ThroughputMeter:
    """Images per second over the last `window` steps of a training or evaluation loop.

    A step begins with `start()` or the end of the step before, and calls `data_ready()` and
    `step(images)`. `images_per_s` covers the steps that the GPU has finished, and does not wait.
    `mean_images_per_s` waits for the GPU: call it once per epoch.
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
        self._older = _Totals()
        self._begin: Mark | None = None
        self._ready: Mark | None = None

    def start(self) -> None:
        """Begin a step; call `start()` before a loop, and after a pause such as evaluation."""
        self._begin, self._ready = self._clock.mark(), None

    def data_ready(self) -> None:
        """Mark the arrival of the step's batch; the step waited for data until this call."""
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
            self._older.add(oldest, self._clock)
        self._begin, self._ready = end, None

    def images_per_s(self) -> float | None:
        """Return images per second of the window's finished steps, or None if there are none."""
        return self._finished(_Totals()).images_per_s()

    def data_wait_fraction(self) -> float | None:
        """Return the fraction of (GPU) time that the window's finished steps waited for data."""
        totals = self._finished(_Totals())
        return 1 - totals.work_s / totals.elapsed_s if totals.elapsed_s > 0 else None

    def mean_images_per_s(self, exclude_data_wait: bool = False) -> float | None:
        """Wait for the device; return images per second over all steps since the last `reset`."""
        if self._steps:
            self._clock.wait(self._steps[-1].end)
        return self._finished(dataclasses.replace(self._older)).images_per_s(exclude_data_wait)

    def _finished(self, totals: _Totals) -> _Totals:
        """Add the window's finished steps to `totals`, and return `totals`."""
        for step in itertools.takewhile(lambda step: self._clock.reached(step.end), self._steps):
            totals.add(step, self._clock)
        return totals
