"""Decide whether a batch fits into a GPU's memory, and find the largest batch that fits.

Buffers grow linearly with the batch, so traces of two small batches give the trace of any batch.
Bisection over these computed traces estimates the largest batch. Recorded traces then confirm it.
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, lru_cache

from tresnet.errors import InputError
from tresnet.memory.device import Device
from tresnet.memory.plan import ModelLike, StepPlan, by_keywords, make_plan
from tresnet.memory.prediction import record
from tresnet.memory.replay import held_at_peak_bytes, replay
from tresnet.memory.trace import Trace
from tresnet.memory.workspaces import HIGH_LIMIT_BYTES

# Pairs of batch sizes. If a model runs other operations for the pair's larger batch than for the
# smaller, the next pair is used. tresnet_l pads its channels for 4 or more images of 448 pixels.
# No pair contains 1, because batch norm in training rejects a single image with 1x1 features.
_SMALL_BATCHES = ((2, 4), (16, 32), (128, 256))
_LIMIT = 2**20  # largest batch that is tried
# Assumed relative error of the bytes that a trace predicts.
_DOUBT = 0.01


class Fits(StrEnum):
    """Whether a batch fits into the memory of a device."""

    YES = "yes"
    UNCERTAIN = "uncertain"
    NO = "no"


@dataclass(frozen=True)
class MaxBatch:
    """Batches up to `batch_size` fit (0 if none fits); batches of `no_from` and more do not fit.

    Whether a batch between these sizes fits depends on the CUDA context and cuDNN's workspaces.
    """

    batch_size: int
    no_from: int
    device: Device

    def answer(self, batch_size: int) -> Fits:
        """Return whether a batch of this size fits."""
        if batch_size <= self.batch_size:
            return Fits.YES
        return Fits.NO if batch_size >= self.no_from else Fits.UNCERTAIN

    def __str__(self) -> str:
        fits = f"batch {self.batch_size}" if self.batch_size else "no batch"
        lines = [f"GPU: {self.device}", f"fits: {fits}"]
        if self.no_from - self.batch_size > 1:
            lines.append(f"uncertain: {self.batch_size + 1} to {self.no_from - 1}")
        return "\n".join([*lines, f"does not fit: from {self.no_from} on"])


def fits(trace: Trace, device: Device) -> Fits:
    """Return whether the traced step fits into a device of known capacity.

    YES means that two replays beside a CUDA context of `context_high_bytes` fit: one with the
    largest workspaces, and one with the expected workspaces. NO means that the step's tensors do
    not fit beside a context of `context_low_bytes`. Otherwise the result is UNCERTAIN.
    """
    capacity = _capacity(device)
    worst = int((capacity - device.context_high_bytes) * (1 - _DOUBT))
    runs = (
        replay(trace, worst, highest_workspaces=high).out_of_memory_event is None
        for high in (True, False)
    )
    if worst > 0 and all(runs):
        return Fits.YES
    at_least = held_at_peak_bytes(trace) * (1 - _DOUBT) + device.context_low_bytes
    return Fits.NO if at_least > capacity else Fits.UNCERTAIN


@by_keywords(StepPlan)
def max_batch(model: ModelLike, plan: StepPlan) -> MaxBatch:
    """Find the largest batch that fits; the arguments are those of `predict` without `batch_size`.

    The search extrapolates from traces of two small batches, and records traces near its result.

    Raises:
        InputError: the GPU's memory is not known, or `predict` would raise this error.
    """
    described = plan.gpu
    _capacity(described)
    _, module, step = make_plan(model, batch_size=1, **vars(plan))

    @lru_cache(maxsize=4)
    def trace(batch_size: int) -> Trace:
        return record(module, replace(step, batch_size=batch_size), described)

    first, other = ((n, trace(n)) for n in _SMALL_BATCHES[0])
    for sizes in _SMALL_BATCHES[1:]:
        if first[1].events != other[1].events:
            first, other = ((n, trace(n)) for n in sizes)
    traced = interpolated(first, other)

    @cache
    def predict(batch_size: int) -> Fits:
        return fits(traced(batch_size), described)

    guess = _bisect(lambda n: predict(n) is Fits.YES, 0, _LIMIT)
    if guess > 3 and trace(guess).events != other[1].events:
        # Large batches run other operations: interpolate between two large batches instead.
        first, other = ((n, trace(n)) for n in (guess // 2, guess))
        if first[1].events == other[1].events:
            traced = interpolated(first, other)
            predict.cache_clear()

    @cache
    def answer(batch_size: int) -> Fits:
        try:
            return fits(trace(batch_size), described)
        except InputError:
            # Batch norm in training may reject a batch of one image. The answer is then NO.
            if batch_size > 1:
                raise
            return Fits.NO

    yes = _edge(lambda n: predict(n) is Fits.YES, lambda n: answer(n) is Fits.YES)
    no = _edge(lambda n: predict(n) is not Fits.NO, lambda n: answer(n) is not Fits.NO)
    return MaxBatch(yes, no + 1, described)


def _edge(predicted: Callable[[int], bool], holds: Callable[[int], bool]) -> int:
    """Return the largest n with `holds(n)`; begin at the largest n with `predicted(n)`."""
    edge, stride = _bisect(predicted, 0, _LIMIT), 1
    while edge > 0 and not holds(edge):
        edge, stride = max(edge - stride, 0), stride * 2
    if stride > 1:
        return _bisect(holds, edge, edge + stride)
    while holds(edge + stride):
        edge, stride = edge + stride, stride * 2
    return _bisect(holds, edge, edge + stride)


def _bisect(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest n in [low, high) for which `holds(n)`; `holds(low)` is assumed."""
    return low + bisect.bisect_left(range(low + 1, high), True, key=lambda n: not holds(n))


def _capacity(device: Device) -> int:
    if device.capacity_bytes is None:
        raise InputError(
            "expected the GPU's memory: give --gpu-memory 80GiB (gpu_memory='80GiB' in Python), "
            "or name its --gpu (device)"
        )
    return device.capacity_bytes


def interpolated(first: tuple[int, Trace], second: tuple[int, Trace]) -> Callable[[int], Trace]:
    """Return a function that computes any batch size's trace from the traces of two batch sizes.

    Raises:
        InputError: the model's operations depend on the batch size.
    """
    (n, trace), (other_n, other) = first, second
    if trace.events != other.events:
        raise InputError(
            f"expected a model that does the same at every batch size, got other operations at "
            f"batch {other_n} than at {n}: predict each batch size instead"
        )

    def at(batch_size: int) -> Trace:
        def grown(a: int, b: int) -> int:
            return max(round(a + (b - a) / (other_n - n) * (batch_size - n)), 0)

        buffers = [
            replace(a, n_bytes=grown(a.n_bytes, b.n_bytes))
            for a, b in zip(trace.buffers, other.buffers, strict=True)
        ]
        operations = list(trace.operations)
        for index, (a, b) in enumerate(zip(operations, other.operations, strict=True)):
            if a.workspace_high_bytes != b.workspace_high_bytes:
                high = grown(a.workspace_high_bytes, b.workspace_high_bytes)
                operations[index] = replace(a, workspace_high_bytes=min(high, HIGH_LIMIT_BYTES))
        return Trace(buffers, operations, trace.events, trace.step_starts)

    return at
