"""`tresnet bench max-batch`: the largest training batch that fits, found by running real steps."""

import contextlib
import dataclasses
import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tresnet import env
from tresnet.errors import InputError
from tresnet.measure.cases import BenchCase
from tresnet.measure.memory import MemoryMeter, is_out_of_memory, to_mib
from tresnet.measure.models import prepare
from tresnet.measure.records import RecordFile
from tresnet.measure.runner import (
    Contender,
    NoResultError,
    Outcome,
    RunSettings,
    check_numbers,
    run,
    searching_algorithms,
)

# The first step has no optimizer state yet: memory is at its peak in the second.
_STEPS = 2
# The first stride past the foreseen edge, as a share of it.
_STRIDE = 1 / 32
# Share of a case's time after which no batch is tried: the rest is for the one that is running.
_TRYING_SHARE = 0.75
_NO_BATCH = 2**20  # a bound where none is given


@dataclasses.dataclass(frozen=True)
class LargestSettings:
    """What all cases of a search share.

    Attributes:
        device: where to run.
        first: the batch tried first, then twice as much.
        granularity: the answer is a multiple of this, and this is how exact it is.
        at_most: larger batches are not tried; None for no bound.
        memory_gib: of PyTorch's allocator (the CUDA context comes on top); None for all.
        seed: of weights and input.
        time_limit_s: of all cases, each of which has an equal share. None for no limit.
    """

    device: str = "cuda"
    first: int = 64
    granularity: int = 16
    at_most: int | None = None
    memory_gib: float | None = None
    seed: int = 0
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            InputError: one is out of range, or a CPU's memory is to be filled.
        """
        check_numbers(self, first=1, granularity=1)
        RunSettings(time_limit_s=self.time_limit_s)
        if self.first % self.granularity:
            raise InputError(
                f"expected a first batch divisible by {self.granularity}, got {self.first}"
            )
        if self.at_most is not None and self.at_most < self.first:
            raise InputError(f"expected at_most of at least {self.first}, got {self.at_most}")
        if self.memory_gib is not None and not 0 < self.memory_gib < math.inf:
            raise InputError(f"expected a memory limit above 0 GiB, got {self.memory_gib}")
        if self.at_most is None and not self.device.startswith("cuda"):
            raise InputError(
                f"expected at_most on {self.device}, got none: only a GPU says when it is full"
            )

    @property
    def bound(self) -> int | None:
        """The largest multiple of the granularity that may be tried."""
        return None if self.at_most is None else self.at_most // self.granularity * self.granularity


def largest_batches(
    cases: Sequence[BenchCase],
    settings: LargestSettings,
    *,
    output_dir: str | os.PathLike[str],
    argv: Sequence[str],
    log: Callable[[str], object],
) -> tuple[Outcome, RecordFile]:
    """Find the largest training batch of each case, and record it.

    Two small batches foretell the edge (every buffer grows with the batch by a constant); real steps
    around it find it. cuDNN does not search for algorithms meanwhile, as each new batch would cost it
    seconds; the answer is then run with that search, and made smaller should it not fit.

    Args:
        cases: what to try; their batch sizes are not used.
        settings: shared by all.
        output_dir: of the record.
        argv: the command line, for the record.
        log: called with a line for each try.

    Raises:
        InputError: a case that cannot be run at all; nothing has run then.
    """
    device = env.timed_device(settings.device)
    first = [dataclasses.replace(case, batch_size=settings.first) for case in cases]
    checked = [case.checked(True, device.type == "cuda") for case in first]
    record = RecordFile(
        output_dir,
        "bench_max_batch",
        device=device,
        settings=dataclasses.asdict(settings),
        argv=argv,
    )
    share_s = None if settings.time_limit_s is None else settings.time_limit_s / len(checked)
    compiles = any(case.compile != "none" for case in checked)
    with searching_algorithms(False), _limited(device, settings.memory_gib) as limit:
        outcome = run(
            [[LargestContender(case, settings, device, limit, share_s, log)] for case in checked],
            RunSettings(rounds=0, case_limit_s=share_s),
            log=log,
            save=record.write,
            device=device,
            compiles=compiles,
        )
    return outcome, record


class LargestContender(Contender):
    """The search for one case.

    Its columns: `largest_batch`, the largest that ran; `limited_by`: `memory`, or the bound or the
    time limit that was given; `memory_limit_mib`: what the allocator was allowed, or the device's
    memory; `max_allocated_mib`: peak at the largest batch; `tries`: each batch tried, and whether it
    ran.
    """

    def __init__(
        self,
        case: BenchCase,
        settings: LargestSettings,
        device: torch.device,
        limit_bytes: int | None,
        share_s: float | None,
        log: Callable[[str], object],
    ) -> None:
        """Keep a checked case, what the allocator may take, and the time there is."""
        self._case, self._settings, self._device = case, settings, device
        self._limit_bytes, self._log = limit_bytes, log
        self._peaks: dict[int, int] = {}
        self._time_s = math.inf if share_s is None else _TRYING_SHARE * share_s
        self._deadline_s = math.inf
        self.label = case.label()
        self.columns: dict[str, Any] = {
            "model": case.model,
            **dataclasses.asdict(case),
            "largest_batch": None,
            "limited_by": None,
            "memory_limit_mib": to_mib(limit_bytes),
            "max_allocated_mib": None,
            "tries": [],
        }

    def set_up(self) -> None:
        """Search."""
        settings, grain = self._settings, self._settings.granularity
        self._deadline_s = time.perf_counter() + self._time_s
        try:
            largest = find_edge(self._fits, self._foreseen, settings.first, grain, settings.bound)
            ended_by = f"at most {largest}" if largest == settings.bound else "memory"
        except TimeoutError:
            largest = self.columns["largest_batch"]
            ended_by = "the time limit"
        if not largest:
            if not self.columns["tries"]:
                raise NoResultError("out_of_time", "the time limit had passed")
            raise NoResultError("out_of_memory", f"not even a batch of {grain} fits")
        largest = self._with_search(largest)
        self.columns |= {
            "largest_batch": largest,
            "limited_by": ended_by,
            "max_allocated_mib": to_mib(self._peaks.get(largest)),
        }

    def _with_search(self, largest: int) -> int:
        """The largest that fits with cuDNN's search for algorithms too, from `largest` down."""
        if self._device.type != "cuda":
            return largest
        with searching_algorithms():
            while largest > self._settings.granularity and not self._fits(largest):
                largest -= self._settings.granularity
        return largest

    def _foreseen(self) -> int | None:
        """The edge by the line through the last two peaks; None where memory is not known."""
        if self._limit_bytes is None or len(self._peaks) < 2:
            return None
        (small, low), (large, high) = sorted(self._peaks.items())[-2:]
        per_image = (high - low) / (large - small)
        return large + int((self._limit_bytes - high) / per_image) if per_image > 0 else None

    def _fits(self, batch: int) -> bool:
        """Whether training steps at this batch run."""
        if time.perf_counter() > self._deadline_s:
            raise TimeoutError
        meter = MemoryMeter(self._device)
        meter.reset_peak()
        case, fits = dataclasses.replace(self._case, batch_size=batch), True
        try:
            step, _, self.columns["input_size"] = prepare(
                case, True, self._device, self._settings.seed
            )
            for _ in range(_STEPS):
                float(step())
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            fits = False
        peak = meter.snapshot().max_allocated
        step = None  # frees the memory, as does leaving the handler
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        if fits and peak is not None:
            self._peaks[batch] = peak
        self.columns["tries"].append((batch, fits))
        if fits:  # what a search that is interrupted has found
            self.columns["largest_batch"] = max(batch, self.columns["largest_batch"] or 0)
        self._log(f"{case.label()}: {'fits' if fits else 'does not fit'}")
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


@contextlib.contextmanager
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
