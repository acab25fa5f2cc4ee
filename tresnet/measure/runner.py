"""Runner of all benchmarks: it limits their time, survives failures and writes the record.

A benchmark is a list of groups of contenders. A contender is one thing to measure. Each contender
of a group is set up, warmed up and timed for one round. Further rounds time the whole group, in
alternating order, so that drifting clocks or temperature affect all contenders alike. The record is
written after each set-up and each round, so a failure, signal or power cut loses at most one round.
"""

import abc
import contextlib
import dataclasses
import gc
import math
import signal
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tresnet.errors import MissingDependencyError
from tresnet.measure.memory_meter import failure_in_short, is_out_of_memory
from tresnet.measure.records import RecordFile
from tresnet.measure.settings import RunSettings
from tresnet.process import handled

# Fraction of the time limit after which no contender is set up: further rounds need the rest.
_SET_UP_FRACTION = 0.75
# Cases of one architecture share code objects. By default, torch.compile compiles a code object at
# most 8 times, so further cases would fail or run eagerly.
_RECOMPILE_LIMIT = 256
_TRACE_LINES = 12

Rounds = Sequence[Sequence[float]]
Group = Sequence["Contender"]
Log = Callable[[str], object]


class NoResultError(Exception):
    """Error of a contender that has no result; `status` is its status in the record."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _OutOfTime(BaseException):
    """Error at the time limit; derived from BaseException, because libraries catch Exception."""


class Contender(abc.ABC):
    """Thing to measure, with its columns in the record.

    `units` is the number of images or bytes per timed step. In a group, contenders with equal
    `compared_with` are compared: the column named by `ratio_column` has the ratio of a contender's
    speed to that of the first.
    """

    label: str
    columns: dict[str, Any]
    units: float = 1.0
    compared_with: str = ""
    ratio_column: str = "ratio_to_first"

    @abc.abstractmethod
    def set_up(self) -> None:
        """Build and warm up the contender, so that `visit` can time its steps."""

    def visit(self) -> Sequence[float]:
        """Time one round; return the seconds of each step."""
        return []

    def figures(self, rounds: Rounds) -> dict[str, Any]:
        """Return further columns of the record, computed from the step times of all rounds."""
        return {}

    def close(self) -> None:  # noqa: B027  most contenders have nothing to close
        """Free the contender's memory; can be called in any state and more than once."""


@dataclasses.dataclass
class _Entry:
    contender: Contender
    status: str = "not_begun"
    error: str | None = None
    trace: list[str] = dataclasses.field(default_factory=list)
    rounds: list[list[float]] = dataclasses.field(default_factory=list)
    ratio: float | None = None

    def to_dict(self) -> dict[str, Any]:
        contender = self.contender
        return {
            **contender.columns,
            "status": self.status,
            "error": self.error,
            "trace": self.trace,
            **contender.figures(self.rounds),
            contender.ratio_column: self.ratio,
        }

    def rates(self) -> list[float]:
        return [self.contender.units / statistics.median(times) for times in self.rounds if times]


class Outcome(NamedTuple):
    """Result of a run: `rows` and `labels` of all contenders, in the order passed to `run`.

    A row has the contender's `columns` and `figures`; without a timed step, figures are None or
    empty. `status` is `ok`, `failed`, `out_of_memory`, `out_of_time`, `interrupted`, `left_out` (a
    dependency is missing), or that of a `NoResultError`. `error` is a message; `trace` is the end
    of a traceback. The attribute `interrupted` means that the user or a signal ended the run.
    """

    rows: list[dict[str, Any]]
    labels: list[str]
    interrupted: bool = False
    path: Path | None = None

    @property
    def complete(self) -> bool:
        """Whether every contender was measured, or left out because its dependency is missing."""
        return not self.interrupted and all(
            row["status"] in ("ok", "left_out") for row in self.rows
        )


def run(
    groups: Sequence[Group],
    settings: RunSettings,
    *,
    rounds: int = 0,
    log: Log,
    record: RecordFile | None = None,
    compiles: bool = False,
) -> Outcome:
    """Measure all contenders; an error in a contender ends only that contender.

    Without `rounds`, contenders are only set up. A group is closed before the next starts. With
    `compiles`, torch.compile's limit of recompilations is higher. KeyboardInterrupt is raised only
    before any contender has ended.
    """
    rows = [[_Entry(contender) for contender in group] for group in groups]
    return _Measurement(rows, settings, rounds, log, record, compiles).measure()


@dataclasses.dataclass
class _Measurement:
    groups: list[list[_Entry]]
    settings: RunSettings
    rounds: int
    log: Log
    record: RecordFile | None
    compiles: bool
    began_s: float = dataclasses.field(default_factory=time.perf_counter)

    @property
    def rows(self) -> list[_Entry]:
        return [row for group in self.groups for row in group]

    def measure(self) -> Outcome:
        interrupted = False
        with stopped_by_signals(), _higher_recompile_limit(self.compiles):
            try:
                for group in self.groups:
                    self._measure_group(group)
            except KeyboardInterrupt:
                interrupted = True
                for row in self.rows:
                    if row.status in ("not_begun", "begun"):
                        row.status, row.error = "interrupted", "stopped before there was a result"
                if not self._save():
                    raise
            finally:
                for row in self.rows:
                    row.contender.close()
        labels = [row.contender.label for row in self.rows]
        path = None if self.record is None else self.record.path
        return Outcome([row.to_dict() for row in self.rows], labels, interrupted, path)

    def _measure_group(self, group: Sequence[_Entry]) -> None:
        for row in group:
            if self._left_s(_SET_UP_FRACTION) <= 0:
                row.status = "out_of_time"
                limit_s = self.settings.time_limit_s
                row.error = f"not begun: the time limit of {limit_s:g} s was near"
                continue
            row.status = "begun"
            self._save()
            self._guarded(row, self._begin)
            self._save()
        for number in range(1, self.rounds):
            # `_compare` pairs rounds by number, so a contender with an error runs no more rounds.
            alive = [row for row in group if row.status == "ok" and row.error is None]
            if not alive:
                break
            for row in alive if number % 2 == 0 else reversed(alive):
                if self._left_s() > 0:
                    self._guarded(row, self._visit)
            self._save()
            if self._left_s() <= 0:
                self.log(f"the time limit ends the measurement in round {number + 1}")
                break
            self.log(f"round {number + 1} of {self.rounds} done")
        for row in group:
            row.contender.close()
        tidy()
        if self.compiles:
            torch.compiler.reset()

    def _begin(self, row: _Entry) -> None:
        tidy()
        row.contender.set_up()
        if self.rounds:
            self._visit(row)
        row.status = "ok"
        self.log(f"{row.contender.label}: {'set up and timed once' if row.rounds else 'done'}")

    def _visit(self, row: _Entry) -> None:
        row.rounds.append(list(row.contender.visit()))

    def _guarded(self, row: _Entry, action: Callable[[_Entry], None]) -> None:
        """Run `action`; an error ends only this contender, and the record keeps earlier times."""
        timed = bool(row.rounds)
        try:
            with _alarm(min(self._left_s(), self.settings.case_limit_s or math.inf)):
                action(row)
            return
        except _OutOfTime:
            row.status = "ok" if timed else "out_of_time"
            row.error = "stopped at the time limit"
        except NoResultError as refusal:
            row.status, row.error = refusal.status, str(refusal)
        except MissingDependencyError as error:
            row.status, row.error = "left_out", str(error)
        except Exception as error:
            row.status = "out_of_memory" if is_out_of_memory(error) else "failed"
            row.error = failure_in_short(error)
            lines = "".join(traceback.format_exception(error)).splitlines()
            row.trace = [line[:200] for line in lines[-_TRACE_LINES:]]
        # Outside the except blocks, where the exception would keep tensors alive despite `close`.
        self.log(f"{row.contender.label}: {row.status}: {row.error}")
        if row.status != "ok":
            row.contender.close()
            tidy()

    def _left_s(self, fraction: float = 1.0) -> float:
        limit_s = self.settings.time_limit_s
        if limit_s is None:
            return math.inf
        return fraction * limit_s - (time.perf_counter() - self.began_s)

    def _save(self) -> bool:
        """Write the record if any contender has ended, even in an error; return whether one has."""
        if all(row.status in ("not_begun", "begun", "interrupted") for row in self.rows):
            return False
        for group in self.groups:
            _compare(group)
        if self.record is not None:
            self.record.write([row.to_dict() for row in self.rows])
        return True


def _compare(group: Sequence[_Entry]) -> None:
    """Set each row's `ratio`: its speed divided by the speed of the row it is compared with."""
    if len(group) < 2:
        return
    firsts: dict[str, _Entry] = {}
    for row in group:
        first = firsts.setdefault(row.contender.compared_with, row)
        ratios = [own / base for own, base in zip(row.rates(), first.rates(), strict=False)]
        row.ratio = statistics.median(ratios) if ratios else None


def tidy() -> None:
    """Collect garbage, and return unused memory of PyTorch's allocator to the GPU."""
    gc.collect()
    torch.cuda.empty_cache()  # a no-op where CUDA is not initialised


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP (closed terminal), as on Ctrl-C."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    with handled(numbers, stop):
        yield


@contextlib.contextmanager
def _alarm(limit_s: float) -> Iterator[None]:
    """Raise `_OutOfTime` in the `with` block when `limit_s` seconds have passed."""
    main = threading.current_thread() is threading.main_thread()
    if limit_s == math.inf or not main or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(number: int, frame: object) -> None:
        raise _OutOfTime

    handler = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(limit_s, 1e-3))  # 0 would stop the timer
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def _higher_recompile_limit(compiles: bool) -> contextlib.AbstractContextManager[Any]:
    if not compiles:
        return contextlib.nullcontext()
    from torch._dynamo import config

    return config.patch(recompile_limit=_RECOMPILE_LIMIT, automatic_dynamic_shapes=False)


@contextlib.contextmanager
def cudnn_benchmark(enabled: bool = True) -> Iterator[None]:
    """Turn cuDNN's benchmark mode, which times all algorithms, on or off in the `with` block."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    cudnn.benchmark, cudnn.benchmark_limit = enabled, 0
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before


@contextlib.contextmanager
def timing_on(device: torch.device) -> Iterator[None]:
    """Make `device` the current GPU, and turn cuDNN's benchmark mode on."""
    current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with current, cudnn_benchmark():
        yield
