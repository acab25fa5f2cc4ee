"""Time of a few short calls, without the host's part in it.

A kernel of some microseconds is over before Python has queued the next one, so that plain timing
measures Python. On a GPU the calls are queued behind a kernel that only waits, for as long as the
host needs; the GPU then runs them back to back. On a CPU they are timed as they are.
"""

import time
from collections.abc import Callable, Sequence

import torch

Calls = Sequence[Callable[[], object]]
# Clock cycles: a few ms to begin with, about half a second at most.
_FIRST_CYCLES, _MOST_CYCLES = 2**23, 2**30


class HeldClock:
    """Times blocks of calls on one device.

    Attributes:
        late_blocks: blocks that the host could not queue in time; their time has its part in it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cycles = _FIRST_CYCLES
        self.late_blocks = 0

    def seconds_per_call(self, prepare: Callable[[], Calls]) -> float:
        """Mean time of the calls of one block.

        Every call's result lives until the block ends, so that each writes memory of its own.

        Args:
            prepare: makes the calls; not timed. Called again where the host was too slow.
        """
        if self._device.type != "cuda":
            return _on_the_host(prepare())
        while True:
            calls = prepare()
            elapsed_s, late = self._on_the_gpu(calls)
            if not late:
                return elapsed_s
            if self._cycles >= _MOST_CYCLES:
                self.late_blocks += 1
                return elapsed_s
            self._cycles *= 2

    def _on_the_gpu(self, calls: Calls) -> tuple[float, bool]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self._device)
        torch.cuda._sleep(self._cycles)
        begin.record()
        results = [call() for call in calls]
        late = begin.query()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000 / len(results), late


def _on_the_host(calls: Calls) -> float:
    began_s = time.perf_counter()
    results = [call() for call in calls]
    return (time.perf_counter() - began_s) / len(results)
