"""Throughput and peak memory of models side by side, on synthetic input.

The cases of a run share the machine in turns: every round visits every case (forwards, then
backwards through the list), so that a drift of clocks or temperature meets them all alike. Each
visit starts with `SETTLE_STEPS` untimed steps.

Peak memory is that of steady steps, after warm-up, and counts the case itself: what the other
cases keep on the GPU meanwhile (weights, optimizer state) is subtracted from `max_allocated` and
`reserved`. `device_used` (the whole device) and a CPU's `rss_peak` (the whole process) cannot be
split: only the first case of a run, or a run without interleaving, has them for itself.
"""

import contextlib
import dataclasses
import gc
import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tresnet import env
from tresnet.errors import InputError, TResNetError
from tresnet.measure.cases import BenchCase
from tresnet.measure.clock import Clock, clock_for
from tresnet.measure.memory import (
    MemoryMeter,
    MemorySnapshot,
    failure_in_short,
    is_library_failure,
    is_out_of_memory,
)
from tresnet.measure.percentiles import speed_of
from tresnet.measure.results import BenchInterrupt, BenchRow, BenchSettings
from tresnet.measure.steps import OPTIMIZER, PreparedStep, prepare
from tresnet.models.named import split_name

SETTLE_STEPS = 2
# Share of the time limit after which no case is begun: the rest is for the rounds.
_SET_UP_SHARE = 0.75
# Cases of one architecture share code objects, and torch.compile stops compiling a code object at
# its limit (8): every case must find room, or it would silently be timed in eager mode.
_RECOMPILE_LIMIT = 256


def bench_train(
    cases: Sequence[BenchCase],
    settings: BenchSettings,
    log: Callable[[str], object] | None = None,
) -> list[BenchRow]:
    """Time training steps (forward, loss, backward, SGD with momentum) of each case.

    fp32 weights; 16-bit by autocast, fp16 with a GradScaler.

    Args:
        cases: what to compare, in order; the first is the base of the ratios.
        settings: shared by all.
        log: called with a line of progress; by default this module's logger, level info.

    Returns:
        One row a case, in the order of `cases`. Running out of memory or an error of PyTorch or
        Triton in one of them is noted in its row and the others go on.

    Raises:
        InputError: no cases, or one that cannot be run at all; nothing has run then.
        MissingDependencyError: norm `inplace_abn` without the package; likewise.
        BenchInterrupt: Ctrl-C, once something has been timed; it holds the rows.
    """
    return _Bench(cases, settings, training=True, log=log).run()


def bench_infer(
    cases: Sequence[BenchCase],
    settings: BenchSettings,
    log: Callable[[str], object] | None = None,
) -> list[BenchRow]:
    """Time forward passes in eval and inference mode; the rest is as in `bench_train`."""
    return _Bench(cases, settings, training=False, log=log).run()


def method_of(what: str) -> dict[str, Any]:
    """How `bench_train` or `bench_infer` measured, in words and switches, for its record."""
    training = what == "bench_train"
    return {
        "input": "one synthetic batch, already on the device; of bytes where input is uint8, which our "
        "channels_last stem reads, and others divide by 255 within the step",
        "step": "forward, cross entropy, backward, update" if training else "forward, eval mode",
        "optimizer": OPTIMIZER if training else None,
        "order": "every round visits every case, forwards and backwards in turn; case after case "
        "if interleave is false",
        "settle_steps": SETTLE_STEPS,
        "percentiles": "batch size / percentile of all timed step times; p20 is the slow end",
        "clock": "CUDA events between steps; on a CPU time.perf_counter",
        "peak_memory": "of steady steps, less what other cases keep allocated; device_used_mib "
        "and rss_peak_mib are of the whole device and process",
        "cudnn_benchmark": True,
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


class _Bench:
    """One run: the cases still alive, their rows and their step times."""

    def __init__(
        self,
        cases: Sequence[BenchCase],
        settings: BenchSettings,
        training: bool,
        log: Callable[[str], object] | None,
    ) -> None:
        if not cases:
            raise InputError("expected at least one model to measure, got none")
        self._settings = settings
        self._training = training
        self._device = env.timed_device(settings.device)
        self._meter = MemoryMeter(self._device)
        self._clock: Clock = clock_for(self._device)
        self._log = logging.getLogger(__name__).info if log is None else log
        self._rows = [BenchRow(case.checked(training)) for case in cases]
        self._compiling = any(row.case.compile != "none" for row in self._rows)
        self._times_s: list[list[list[float]]] = [[] for _ in cases]
        self._steps: dict[int, PreparedStep] = {}
        self._primed = MemorySnapshot()
        self._began_s = 0.0

    def run(self) -> list[BenchRow]:
        self._began_s = time.perf_counter()
        with bench_switches(self._device, self._compiling):
            try:
                self._measure()
            except KeyboardInterrupt:
                if not any(self._times_s):
                    raise
                self._cut_short()
                raise BenchInterrupt(self._rows) from None
        self._summarise()
        return self._rows

    def _measure(self) -> None:
        self._primed = _prime(self._device)
        everything = range(len(self._rows))
        turns = [everything] if self._settings.interleave else [[index] for index in everything]
        for turn in turns:
            for index in turn:
                if self._past(_SET_UP_SHARE):
                    limit_s = self._settings.time_limit_s
                    self._rows[index].status = "out_of_time"
                    self._rows[index].error = f"not begun: the time limit of {limit_s:g} s was near"
                else:
                    self._guarded(index, self._set_up)
            self._run_rounds(turn)
            self._steps.clear()
            self._tidy()
            if self._compiling and not self._settings.interleave:
                torch.compiler.reset()

    def _cut_short(self) -> None:
        """Keep the rounds that every case was visited in."""
        if self._settings.interleave:
            visited = [len(rounds) for rounds in self._times_s if rounds]
            self._times_s = [rounds[: min(visited)] for rounds in self._times_s]
        for row, rounds in zip(self._rows, self._times_s, strict=True):
            if row.status == "ok" and not rounds:
                row.status, row.error = "interrupted", "not timed when the run was interrupted"
        self._summarise()

    def _run_rounds(self, turn: Sequence[int]) -> None:
        for number in range(self._settings.rounds):
            if number and self._past(1.0):
                self._log(f"the time limit ends the measurement after {number} rounds")
                break
            alive = [index for index in turn if index in self._steps]
            for index in alive if number % 2 == 0 else reversed(alive):
                self._guarded(index, self._visit)
            self._log(f"round {number + 1} of {self._settings.rounds} done")

    def _past(self, share: float) -> bool:
        """Whether this share of the time limit has gone."""
        limit_s = self._settings.time_limit_s
        return limit_s is not None and time.perf_counter() - self._began_s > share * limit_s

    def _guarded(self, index: int, action: Callable[[int], None]) -> None:
        """Do `action`; a failure of a library ends this case alone."""
        row = self._rows[index]
        try:
            action(index)
        except TResNetError:
            raise
        except Exception as error:
            # a peer may refuse its input in any way of its own
            if split_name(row.case.model)[0] == "tresnet" and not is_library_failure(error):
                raise
            row.status = "out_of_memory" if is_out_of_memory(error) else "failed"
            row.error = failure_in_short(error)
            self._log(f"{row.case.label()}: {row.status}: {row.error}")
        # Outside the handler: the exception would keep the step's tensors alive.
        if row.status in ("out_of_memory", "failed"):
            self._steps.pop(index, None)
            row.speed = row.memory = None
            self._times_s[index].clear()
            self._tidy()

    def _set_up(self, index: int) -> None:
        """Build, warm up and read the peak memory of steady steps."""
        row = self._rows[index]
        self._tidy()
        before = self._meter.snapshot()
        began_s = time.perf_counter()
        step = prepare(row.case, self._training, self._device, self._settings.seed)
        for _ in range(self._settings.warmup_steps):
            step.run()
        self._clock.wait(self._clock.mark())
        row.warmup_s = time.perf_counter() - began_s
        row.case = dataclasses.replace(row.case, input_size=step.input_size)
        row.parameters = step.parameters
        self._tidy()  # the search for algorithms may have taken more than a steady step needs
        self._meter.reset_peak()
        self._settle(step)
        self._clock.wait(self._clock.mark())
        row.memory = _own_memory(self._meter.snapshot(), before, self._primed)
        self._steps[index] = step
        self._log(f"{row.case.label()}: ready after {row.warmup_s:.1f} s, {row.memory.format()}")

    def _visit(self, index: int) -> None:
        """Time one round's steps of a case."""
        step = self._steps[index]
        if len(self._steps) > 1:
            self._empty_cache()  # else the allocator would do so while the clock runs
        output = self._settle(step)
        marks = [self._clock.mark()]
        for _ in range(self._settings.steps_per_round):
            output = step.run()
            marks.append(self._clock.mark())
        self._clock.wait(marks[-1])
        times_s = [self._clock.seconds(begin, end) for begin, end in itertools.pairwise(marks)]
        self._times_s[index].append(times_s)
        if not math.isfinite(float(output.float().sum())):
            self._rows[index].status = "not_finite"
            self._rows[index].error = "the loss or output is not finite"

    def _summarise(self) -> None:
        for row, rounds in zip(self._rows, self._times_s, strict=True):
            if rounds:
                batch = row.case.batch_size
                row.speed = speed_of([time_s for times_s in rounds for time_s in times_s], batch)
                row.round_p50_images_per_s = [
                    speed_of(times_s, batch).p50_images_per_s for times_s in rounds
                ]
        timed = [row for row in self._rows if row.speed is not None]
        if not self._settings.interleave or not timed:
            return
        base = timed[0].round_p50_images_per_s
        for row in timed:
            row.ratio_to_first = statistics.median(
                own / first for own, first in zip(row.round_p50_images_per_s, base, strict=True)
            )

    def _settle(self, step: PreparedStep) -> torch.Tensor:
        for _ in range(SETTLE_STEPS - 1):
            step.run()
        return step.run()

    def _tidy(self) -> None:
        gc.collect()
        self._empty_cache()

    def _empty_cache(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


@contextlib.contextmanager
def bench_switches(device: torch.device, compiling: bool) -> Iterator[None]:
    """Inside, let cuDNN search for its fastest algorithms, and give every case room to compile."""
    searched = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        with contextlib.ExitStack() as stack:
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
            if compiling:
                from torch._dynamo import config

                stack.enter_context(config.patch(recompile_limit=_RECOMPILE_LIMIT))
            yield
    finally:
        torch.backends.cudnn.benchmark = searched


def _prime(device: torch.device) -> MemorySnapshot:
    """Make the matrix library allocate its workspaces, which stay; returns the memory after.

    They belong to every case, but only the first would be seen to allocate them.
    """
    if device.type == "cuda":
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            block = torch.ones(256, 256, device=device, dtype=dtype, requires_grad=True)
            (block @ block).sum().backward()
        torch.cuda.synchronize(device)
        del block
        torch.cuda.empty_cache()
    return MemoryMeter(device).snapshot()


def _own_memory(
    after: MemorySnapshot, before: MemorySnapshot, primed: MemorySnapshot
) -> MemorySnapshot:
    """`after` less what other cases held `before`; what was there when primed is everyone's."""

    def own(now: int | None, earlier: int | None, shared: int | None) -> int | None:
        if now is None or earlier is None or shared is None:
            return now
        return now - max(0, earlier - shared)

    return dataclasses.replace(
        after,
        allocated=own(after.allocated, before.allocated, primed.allocated),
        reserved=own(after.reserved, before.reserved, primed.reserved),
        max_allocated=own(after.max_allocated, before.allocated, primed.allocated),
    )
