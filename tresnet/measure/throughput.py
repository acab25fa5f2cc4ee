"""Images per second of a running loop, without slowing it down."""

import collections
from collections.abc import Iterable

import torch

from tresnet.errors import InputError
from tresnet.measure.clock import Clock, Mark, clock_for

_Step = tuple[int, Mark, Mark]  # images, begin, end


class ThroughputMeter:
    """Images per second over the last steps of a training or evaluation loop.

    On CUDA every step leaves timing events behind and none is waited for: a reading covers the
    steps the GPU has finished. `average_images_per_s` waits once, for the end of an epoch.

        meter.start()
        for images, targets in loader:
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
        self.reset()

    def start(self) -> None:
        """The next step begins now: call it before a loop, and after a pause such as evaluation."""
        self._begin = self._clock.mark()

    def step(self, images: int) -> None:
        """A step over `images` images has been queued; the next step begins now.

        Without a `start()` before it the first step only sets the beginning and is not counted.
        """
        end = self._clock.mark()
        if self._begin is not None:
            self._steps.append((images, self._begin, end))
            if len(self._steps) > self._window:
                self._retire(self._steps.popleft())
        self._begin = end

    def images_per_s(self) -> float | None:
        """Rate over the finished steps of the window; None before the first has finished."""
        finished = []
        for step in self._steps:
            if not self._clock.reached(step[2]):
                break
            finished.append(step)
        return _rate(*self._totals(finished))

    def average_images_per_s(self) -> float | None:
        """Rate over all steps since the last `reset`; waits for the device once."""
        if self._steps:
            self._clock.wait(self._steps[-1][2])
        images, elapsed_s = self._totals(self._steps)
        return _rate(self._older_images + images, self._older_s + elapsed_s)

    def reset(self) -> None:
        """Forget every step, as at the beginning of an epoch; the next needs a `start()`."""
        self._steps: collections.deque[_Step] = collections.deque()
        self._older_images, self._older_s = 0, 0.0
        self._begin: Mark | None = None

    def _retire(self, step: _Step) -> None:
        # A window of steps has been queued since: this waits only if the host is that far ahead.
        self._clock.wait(step[2])
        images, elapsed_s = self._totals([step])
        self._older_images += images
        self._older_s += elapsed_s

    def _totals(self, steps: Iterable[_Step]) -> tuple[int, float]:
        """Images and seconds."""
        images, elapsed_s = 0, 0.0
        for count, begin, end in steps:
            images += count
            elapsed_s += self._clock.seconds(begin, end)
        return images, elapsed_s


def _rate(images: int, elapsed_s: float) -> float | None:
    return images / elapsed_s if elapsed_s > 0 else None
