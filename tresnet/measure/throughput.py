"""Images per second of a running loop, without slowing it down."""

import collections
import dataclasses

import torch

from tresnet.errors import InputError
from tresnet.measure.clock import Clock, Mark, clock_for


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

    def add(self, step: _Step, clock: Clock) -> None:
        self.images += step.images
        self.elapsed_s += clock.seconds(step.begin, step.end)
        self.work_s += clock.seconds(step.ready, step.end)

    def images_per_s(self, exclude_data_wait: bool) -> float | None:
        spent_s = self.work_s if exclude_data_wait else self.elapsed_s
        return self.images / spent_s if spent_s > 0 else None


class ThroughputMeter:
    """Images per second over the last steps of a training or evaluation loop.

    On CUDA every step leaves timing events behind and none is waited for: a reading covers the
    steps the GPU has finished. `average_images_per_s` waits once, for the end of an epoch.

        meter.start()
        for images, targets in loader:
            meter.data_ready()
            ...
            meter.step(images.shape[0])
            print(meter.images_per_s())

    Args:
        device: the device that does the work.
        window: how many steps `images_per_s` looks back.
        clock: takes the marks; None for the one that fits the device.

    Raises:
        InputError: `window` is below 1.
    """

    def __init__(
        self, device: torch.device | str, window: int = 50, clock: Clock | None = None
    ) -> None:
        if window < 1:
            raise InputError(f"expected a window of at least 1 step, got {window}")
        self._clock = clock_for(torch.device(device)) if clock is None else clock
        self._window = window
        self._steps: collections.deque[_Step] = collections.deque()
        self._older = _Totals()
        self._begin: Mark | None = None
        self._ready: Mark | None = None

    def start(self) -> None:
        """The next step begins now: call it before a loop, and after a pause such as evaluation."""
        self._begin, self._ready = self._clock.mark(), None

    def data_ready(self) -> None:
        """The step's batch has arrived; the time since the step began was spent waiting for it."""
        self._ready = self._clock.mark()

    def step(self, images: int) -> None:
        """A step over `images` images has been queued; the next step begins now.

        Without a `start()` before it the first step only sets the beginning and is not counted.
        """
        end = self._clock.mark()
        if self._begin is not None:
            ready = self._begin if self._ready is None else self._ready
            self._steps.append(_Step(images, self._begin, ready, end))
            if len(self._steps) > self._window:
                self._retire(self._steps.popleft())
        self._begin, self._ready = end, None

    def images_per_s(self, exclude_data_wait: bool = False) -> float | None:
        """Rate over the finished steps of the window; None before the first has finished.

        Args:
            exclude_data_wait: leave out the time between a step's begin and its `data_ready()`.
                On CUDA this is the time the GPU starved, not the time the host waited.
        """
        return self._window_totals().images_per_s(exclude_data_wait)

    def data_wait_fraction(self) -> float | None:
        """Share of the window's time that went into waiting for data, 0 to 1; None as above."""
        totals = self._window_totals()
        if totals.elapsed_s <= 0:
            return None
        return 1 - totals.work_s / totals.elapsed_s

    def average_images_per_s(self, exclude_data_wait: bool = False) -> float | None:
        """Rate over all steps since the last `reset`; waits for the device once."""
        totals = dataclasses.replace(self._older)
        if self._steps:
            self._clock.wait(self._steps[-1].end)
        for step in self._steps:
            totals.add(step, self._clock)
        return totals.images_per_s(exclude_data_wait)

    def reset(self) -> None:
        """Forget every step, as at the beginning of an epoch; the next needs a `start()`."""
        self._steps.clear()
        self._older = _Totals()
        self._begin = self._ready = None

    def _retire(self, step: _Step) -> None:
        # A window of steps has been queued since: this waits only if the host is that far ahead.
        self._clock.wait(step.end)
        self._older.add(step, self._clock)

    def _window_totals(self) -> _Totals:
        totals = _Totals()
        for step in self._steps:
            if not self._clock.reached(step.end):
                break
            totals.add(step, self._clock)
        return totals
