"""The largest training batch that fits, found by running real steps."""

import dataclasses
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tresnet import env
from tresnet.errors import InputError
from tresnet.measure.bench import bench_switches
from tresnet.measure.cases import BenchCase
from tresnet.measure.memory import (
    MemoryMeter,
    failure_in_short,
    is_library_failure,
    is_out_of_memory,
    to_mib,
)
from tresnet.measure.results import check_time_limit
from tresnet.measure.steps import prepare
from tresnet.models.named import split_name

# The first step has no optimizer state yet: memory is at its peak in the second.
_STEPS = 2
# The first stride past the foreseen edge, as a share of it.
_STRIDE = 1 / 32
_NO_BATCH = 2**20  # a bound where none is given


@dataclasses.dataclass(frozen=True)
class LargestSettings:
    """What all cases of a search share.

    Attributes:
        device: where to run.
        first: the batch tried first, then twice as much.
        granularity: the answer is a multiple of this, and this is how exact it is.
        at_most: larger batches are not tried; None for no bound.
        memory_limit_gib: of PyTorch's allocator (the CUDA context comes on top); None for all.
        seed: of weights and input.
        time_limit_s: for each case; after it no batch is tried. None for no limit.
    """

    device: str = "cuda"
    first: int = 64
    granularity: int = 16
    at_most: int | None = None
    memory_limit_gib: float | None = None
    seed: int = 0
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            InputError: one is out of range, or a CPU's memory is to be filled.
        """
        for name in ("first", "granularity"):
            if getattr(self, name) < 1:
                raise InputError(f"expected {name} of at least 1, got {getattr(self, name)}")
        if self.first % self.granularity:
            raise InputError(
                f"expected a first batch divisible by {self.granularity}, got {self.first}"
            )
        if self.at_most is not None and self.at_most < self.first:
            raise InputError(f"expected at_most of at least {self.first}, got {self.at_most}")
        if self.memory_limit_gib is not None and not 0 < self.memory_limit_gib < math.inf:
            raise InputError(f"expected a memory limit above 0 GiB, got {self.memory_limit_gib}")
        check_time_limit(self.time_limit_s)
        if self.at_most is None and not self.device.startswith("cuda"):
            raise InputError(
                f"expected at_most on {self.device}, got none: only a GPU says when it is full"
            )


@dataclasses.dataclass
class LargestRow:
    """The answer for a case.

    Attributes:
        case: with every default resolved; its batch is the first one tried.
        status: `ok`, `out_of_memory` (not even one batch of the granularity fits), `out_of_time`
            (none was tried) or `failed`.
        error: first line of what went wrong.
        largest_batch: the largest that ran.
        limited_by: `memory`, or the bound or the time limit that was given.
        memory_limit_mib: what the allocator was allowed, or the device's memory.
        max_allocated_mib: peak at the largest batch.
        tries: each batch tried, and whether it ran.
    """

    case: BenchCase
    status: str = "ok"
    error: str | None = None
    largest_batch: int | None = None
    limited_by: str | None = None
    memory_limit_mib: float | None = None
    max_allocated_mib: float | None = None
    tries: list[tuple[int, bool]] = dataclasses.field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The row for a record."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del own["case"]
        return {**dataclasses.asdict(self.case), **own}


def largest_batches(
    cases: Sequence[BenchCase], settings: LargestSettings, log: Callable[[str], object]
) -> list[LargestRow]:
    """Find the largest training batch of each case.

    Two small batches foretell the edge (every buffer grows with the batch by a constant); real steps
    around it find it.

    Args:
        cases: what to try; their batch sizes are not used.
        settings: shared by all.
        log: called with a line for each try.

    Raises:
        InputError: no cases, or one that cannot be run at all.
        MissingDependencyError: norm `inplace_abn` without the package.
    """
    if not cases:
        raise InputError("expected at least one model to measure, got none")
    device = env.timed_device(settings.device)
    first = [dataclasses.replace(case, batch_size=settings.first) for case in cases]
    rows = [LargestRow(case.checked(training=True)) for case in first]
    compiling = any(row.case.compile != "none" for row in rows)
    with bench_switches(device, compiling), _limited(device, settings.memory_limit_gib) as limit:
        for row in rows:
            row.memory_limit_mib = to_mib(limit)
            _Search(row, settings, device, limit, log).run()
            if row.case.compile != "none":
                torch.compiler.reset()
    return rows


class _Search:
    """The search for one case."""

    def __init__(
        self,
        row: LargestRow,
        settings: LargestSettings,
        device: torch.device,
        limit_bytes: int | None,
        log: Callable[[str], object],
    ) -> None:
        self._row, self._settings, self._device = row, settings, device
        self._limit_bytes, self._log = limit_bytes, log
        self._peaks: dict[int, int] = {}
        limit_s = settings.time_limit_s
        self._deadline_s = None if limit_s is None else time.perf_counter() + limit_s

    def run(self) -> None:
        row, grain = self._row, self._settings.granularity
        try:
            largest = find_edge(
                self._fits, self._foreseen, self._settings.first, grain, self._bound()
            )
            ended_by = f"at most {largest}" if largest == self._bound() else "memory"
        except TimeoutError:
            largest = max((batch for batch, fits in row.tries if fits), default=0)
            ended_by = "the time limit"
        if row.status == "failed":
            return
        if not largest:
            row.status, row.error = "out_of_memory", f"not even a batch of {grain} fits"
            if not row.tries:
                row.status, row.error = "out_of_time", "the time limit had passed"
            return
        row.largest_batch, row.max_allocated_mib = largest, to_mib(self._peaks.get(largest))
        row.limited_by = ended_by

    def _bound(self) -> int | None:
        at_most, grain = self._settings.at_most, self._settings.granularity
        return None if at_most is None else at_most // grain * grain

    def _foreseen(self) -> int | None:
        """The edge by the line through the last two peaks; None where memory is not known."""
        if self._limit_bytes is None or len(self._peaks) < 2:
            return None
        (small, low), (large, high) = sorted(self._peaks.items())[-2:]
        per_image = (high - low) / (large - small)
        return large + int((self._limit_bytes - high) / per_image) if per_image > 0 else None

    def _fits(self, batch: int) -> bool:
        """Whether training steps at this batch run; False too after a failure of another kind."""
        row = self._row
        if row.status == "failed":
            return False
        if self._deadline_s is not None and time.perf_counter() > self._deadline_s:
            raise TimeoutError
        meter = MemoryMeter(self._device)
        fits, failure, input_size = True, None, row.case.input_size
        meter.reset_peak()
        case = dataclasses.replace(row.case, batch_size=batch)
        try:
            step = prepare(case, True, self._device, self._settings.seed)
            input_size = step.input_size
            for _ in range(_STEPS):
                float(step.run())
        except Exception as error:
            # a peer may refuse its input in any way of its own
            if split_name(row.case.model)[0] == "tresnet" and not is_library_failure(error):
                raise
            fits = False
            if not is_out_of_memory(error):
                failure = failure_in_short(error)
        peak = meter.snapshot().max_allocated
        step = None  # frees the memory, as does leaving the handler
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        if failure is not None:
            row.status, row.error = "failed", failure
        row.case = dataclasses.replace(row.case, input_size=input_size)
        if fits and peak is not None:
            self._peaks[batch] = peak
        row.tries.append((batch, fits))
        self._log(f"{case.label()}: {failure or ('fits' if fits else 'does not fit')}")
        return fits


def find_edge(
    fits: Callable[[int], bool],
    foreseen: Callable[[], int | None],
    first: int,
    grain: int,
    at_most: int | None,
) -> int:
    """The largest multiple of `grain` that fits; 0 if none does.

    Args:
        fits: tries a batch, each once.
        foreseen: a guess of the edge, asked after two batches have fitted; None for no idea.
        first: tried first, a multiple of `grain`.
        grain: a positive number.
        at_most: nothing above is tried; a multiple of `grain`, or None.
    """
    bound = _NO_BATCH // grain * grain if at_most is None else at_most
    edge = _Edge(fits, 0, bound + grain)
    for batch in (first, 2 * first):
        if batch < edge.failing and batch > edge.fitting:
            edge.attempt(batch)
    if edge.fitting == 2 * first < bound:
        guess = foreseen() or 2 * edge.fitting
        candidate = min(max(guess // grain * grain, edge.fitting + grain), bound)
        stride = max(int(candidate * _STRIDE) // grain * grain, grain)
        # from the guess in strides that double, up or down, until the edge lies between
        sign = 1 if candidate < edge.failing and edge.attempt(candidate) else -1
        while edge.fitting < candidate + sign * stride < edge.failing:
            candidate += sign * stride
            stride *= 2
            if edge.attempt(candidate) != (sign > 0):
                break
    while edge.failing - edge.fitting > grain:
        edge.attempt((edge.fitting + edge.failing) // 2 // grain * grain)
    return edge.fitting


@dataclasses.dataclass
class _Edge:
    """The largest batch known to fit, and the smallest known not to."""

    fits: Callable[[int], bool]
    fitting: int
    failing: int

    def attempt(self, batch: int) -> bool:
        fits = self.fits(batch)
        if fits:
            self.fitting = batch
        else:
            self.failing = batch
        return fits


@contextmanager
def _limited(device: torch.device, limit_gib: float | None) -> Iterator[int | None]:
    """Inside, PyTorch's allocator may take no more; yields the bytes there are, None on a CPU."""
    if device.type != "cuda":
        yield None
        return
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    limit_bytes = total_bytes if limit_gib is None else min(total_bytes, int(limit_gib * 2**30))
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes, device)
    try:
        yield limit_bytes
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
