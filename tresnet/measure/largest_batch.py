"""`tresnet bench max-batch`: the largest training batch that fits, found by running real steps."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tresnet import devices
from tresnet.errors import InputError
from tresnet.measure import runner
from tresnet.measure.cases import BenchCase
from tresnet.measure.contenders import prepare
from tresnet.measure.memory_meter import MemoryMeter, is_out_of_memory, to_mib
from tresnet.measure.records import RecordFile
from tresnet.measure.settings import LargestSettings
from tresnet.search import find_edge
from tresnet.settings.fields import parse_size

# The second step has the peak, because the first step begins without optimizer state. CUDA graphs
# do not limit the batch: they are captured later, and if a graph does not fit, steps stay eager.
_STEPS = 2
# After this fraction of a case's time limit, no new batch is tried. The batch that is then running
# may take the rest of the time.
_TRYING_FRACTION = 0.75
_AT_MOST = 2**20  # without --at-most


def largest_batches(
    cases: Sequence[BenchCase], settings: LargestSettings, log: runner.Log
) -> runner.Outcome:
    """Find the largest training batch of each case (model with settings); record the results.

    During the search, cuDNN's benchmark mode is off, because it takes seconds for each new batch.
    The mode also takes memory: after the search, the batch is reduced until it fits with the mode.
    """
    settings.check()
    device = devices.timed_device(settings.device)
    if settings.at_most is None and device.type != "cuda":
        raise InputError(
            f"expected --at-most on {device}, got none: without a GPU, nothing limits the batch"
        )
    first = [dataclasses.replace(case, batch_size=settings.first) for case in cases]
    checked = [case.checked(True, devices.capability(device)) for case in first]
    about, what = settings.to_dict(), "bench_max_batch"
    record = RecordFile(settings.output_dir, what, device=device, settings=about)
    part_s = (settings.time_limit_s or math.inf) / len(checked)
    limit_s = min(part_s, settings.case_limit_s or math.inf)
    each = dataclasses.replace(settings, time_limit_s=None, case_limit_s=limit_s)
    compiles = any(case.step.compute.compile != "none" for case in checked)
    with runner.cudnn_benchmark(False), _limited(device, settings.gpu_memory) as limit:
        groups = [[LargestContender(case, each, device, limit, log)] for case in checked]
        return runner.run(groups, each, log=log, record=record, compiles=compiles)


class LargestContender(runner.Contender):
    """Search for the largest batch of one case.

    Column `limited_by` is `memory`, `the time limit` or, for --at-most 512, `at most 512`. `tries`
    has each tried batch size, and whether it fitted. `max_allocated_mib` is of `largest_batch`.
    """

    def __init__(
        self,
        case: BenchCase,
        settings: LargestSettings,
        device: torch.device,
        limit_bytes: int | None,
        log: runner.Log,
    ) -> None:
        self._case, self._settings, self._device = case, settings, device
        self._log = log
        self.label = case.label(True)
        self.columns: dict[str, Any] = {
            "model": case.model,
            **case.columns(),
            "largest_batch": None,
            "limited_by": None,
            "memory_limit_mib": to_mib(limit_bytes),
            "max_allocated_mib": None,
            "tries": [],
        }

    def set_up(self) -> None:
        first, grain = self._settings.first, self._settings.granularity
        limit_s = self._settings.case_limit_s or math.inf
        deadline_s = time.perf_counter() + _TRYING_FRACTION * limit_s
        bound = (self._settings.at_most or _AT_MOST) // grain * grain

        def fits_in_time(batch: int) -> bool:
            if time.perf_counter() > deadline_s:
                raise TimeoutError
            return self._fits(batch)

        try:
            edge = find_edge(fits_in_time, first, stride=first, multiple_of=grain, at_most=bound)
            ended_by = f"at most {edge}" if edge == bound else "memory"
        except TimeoutError:
            ended_by = "the time limit"
        largest = self.columns["largest_batch"]
        if largest is None:
            if ended_by == "the time limit":
                raise runner.NoResultError("out_of_time", "no batch fitted within the time limit")
            raise runner.NoResultError("out_of_memory", f"not even a batch of {grain} fits")
        if self._device.type == "cuda":
            with runner.cudnn_benchmark():
                while not self._fits(largest) and largest > grain:
                    largest -= grain
        self.columns |= {"largest_batch": largest, "limited_by": ended_by}

    def _fits(self, batch: int) -> bool:
        meter = MemoryMeter(self._device)
        meter.reset_peak()
        case, fits = dataclasses.replace(self._case, batch_size=batch), True
        try:
            step, _, self.columns["input_size"], *_ = prepare(case, True, self._device)
            for _ in range(_STEPS):
                float(step())  # waits for the GPU, so that errors of its kernels are raised here
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            fits = False
        peak_mib = to_mib(meter.snapshot().max_allocated)
        step = None  # frees the model and its tensors
        runner.tidy()
        self.columns["tries"].append((batch, fits))
        if fits:  # larger than each batch that fitted before, until cuDNN's benchmark mode is on
            self.columns |= {"largest_batch": batch, "max_allocated_mib": peak_mib}
        self._log(f"{case.label(True)}: {'fits' if fits else 'does not fit'}")
        return fits


@contextlib.contextmanager
def _limited(device: torch.device, limit: str | None) -> Iterator[int | None]:
    """Limit PyTorch's GPU allocator in the `with` block; yield the limit in bytes (CPU: None)."""
    if device.type != "cuda":
        yield None
        return
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    limit_bytes = total_bytes if limit is None else min(total_bytes, parse_size(limit))
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes, device)
    try:
        yield limit_bytes
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
