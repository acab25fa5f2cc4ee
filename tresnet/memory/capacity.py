"""Decision whether a batch fits into a GPU's memory, and search for the largest batch that fits.

Tensors grow linearly with the batch size, so any trace can be computed from two recorded traces.
A search over computed traces estimates the largest batch. Recorded traces then correct it, because
some tensors grow in steps: kernels' partial sums, by which the allocator may choose other blocks.
"""

from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple

from tresnet.errors import InputError
from tresnet.memory.device import Device
from tresnet.memory.plan import MemoryPlan, ModelLike, make_plan, plan_of
from tresnet.memory.prediction import RELATIVE_ERROR, record
from tresnet.memory.replay import peak_live_bytes, replay
from tresnet.memory.trace import Trace
from tresnet.memory.workspaces import HIGH_LIMIT_BYTES
from tresnet.search import find_edge

# Pairs of batch sizes, to interpolate traces. If a pair's operations differ, the next pair is used:
# for example, tresnet_l pads its channels for 20 or more images of 192 pixels. No pair has a batch
# of 1, because batch norm in training rejects a single image with 1x1 features.
_SMALL_BATCHES = ((16, 32), (128, 256), (2, 4))
# Estimates of an edge, each of which is recorded, before every batch beside the edge is.
_ESTIMATES = 3


class Fits(StrEnum):
    """Whether a batch fits into the memory of a device."""

    YES = "yes"
    UNCERTAIN = "uncertain"
    NO = "no"


class MaxBatch(NamedTuple):
    """Prediction of the largest batch: `batch_size` fits, but `no_from` and larger ones do not.

    `batch_size` is 0 if no batch fits. Whether a batch between these sizes fits depends on the CUDA
    context and cuDNN's workspaces.
    """

    batch_size: int
    no_from: int
    device: Device

    def answer(self, batch_size: int) -> Fits:
        if batch_size <= self.batch_size:
            return Fits.YES
        return Fits.NO if batch_size >= self.no_from else Fits.UNCERTAIN

    def __str__(self) -> str:
        fits = f"batch {self.batch_size}" if self.batch_size else "no batch"
        lines = [f"GPU: {self.device}", f"fits: {fits}"]
        if self.no_from - self.batch_size > 1:
            lines.append(f"uncertain: {self.batch_size + 1} to {self.no_from - 1}")
        return "\n".join([*lines, f"does not fit: from {self.no_from} on"])


def fits(trace: Trace, device: Device, beside_bytes: int = 0) -> Fits:
    """Return whether the traced step fits into a device of known capacity.

    YES means that the step fits beside a CUDA context of `context_high_bytes` and beside
    `beside_bytes`, both with the largest and with the expected workspaces. NO means that the step's
    tensors do not fit beside a context of `context_low_bytes`. Otherwise the result is UNCERTAIN.
    """
    capacity = _capacity(device)
    worst = int((capacity - device.context_high_bytes) * (1 - RELATIVE_ERROR)) - beside_bytes
    runs = (
        replay(trace, worst, highest_workspaces=high).out_of_memory_event is None
        for high in (True, False)
    )
    if worst > 0 and all(runs):
        return Fits.YES
    at_least = peak_live_bytes(trace) * (1 - RELATIVE_ERROR) + device.context_low_bytes
    return Fits.NO if at_least > capacity else Fits.UNCERTAIN


def max_batch(model: ModelLike, **settings: Any) -> MaxBatch:
    """Find the largest batch that fits; the arguments are those of `predict` without `batch_size`.

    Raises:
        InputError: the GPU's memory is not known, or `predict` would raise this error.
    """
    return largest_batch(model, plan_of("max_batch", 1, settings))


def largest_batch(
    model: ModelLike, plan: MemoryPlan, evaluation: MemoryPlan | None = None
) -> MaxBatch:
    """Find the largest batch with which the step of `plan` fits; its `batch_size` has no effect.

    `evaluation` is the plan of an inference with equal batches, which needs memory of its own: a
    CUDA graph of the step keeps the step's memory.
    """
    device = plan.gpu
    _capacity(device)
    traces = _Traces(model, replace(plan, batch_size=1))
    beside_bytes = _bytes_of(model, evaluation) if evaluation is not None else lambda _: 0

    @cache
    def confirm(batch_size: int) -> Fits:
        try:
            return fits(traces.record(batch_size), device, beside_bytes(batch_size))
        except InputError:
            if batch_size > 1:
                raise
            return Fits.NO  # batch norm in training may reject a batch of one image

    def estimated(batch_size: int) -> Fits:
        return fits(traces.estimate(batch_size), device, beside_bytes(batch_size))

    def largest(accepts: Callable[[Fits], bool], start: int) -> int:
        for _ in range(_ESTIMATES):
            start = max(find_edge(cache(lambda n: accepts(estimated(n))), start), 1)
            if start == 1 or not traces.add(start):
                break
        return find_edge(lambda n: accepts(confirm(n)), start)

    fitting = largest(lambda answer: answer is Fits.YES, traces.add_pair())
    no_from = largest(lambda answer: answer is not Fits.NO, max(fitting, 1)) + 1
    return MaxBatch(fitting, no_from, device)


class _Traces:
    """Recorded traces of a step by batch size, and traces computed from them."""

    def __init__(self, model: ModelLike, plan: MemoryPlan) -> None:
        _, self.module, self._plan = make_plan(model, plan)
        self._traces: dict[int, Trace] = {}

    def record(self, batch_size: int) -> Trace:
        if batch_size not in self._traces:
            plan = replace(self._plan, batch_size=batch_size)
            trace = record(self.module, plan, plan.gpu)
            for other in self._traces.values():
                if other.events == trace.events:  # one list for all, which is quickly compared
                    trace.events = other.events
            self._traces[batch_size] = trace
        return self._traces[batch_size]

    def add_pair(self) -> int:
        """Record two small batches, with equal operations if possible; return the larger one."""
        for pair in _SMALL_BATCHES:
            for batch_size in pair:
                self.record(batch_size)
            if self._partner(pair[0]) is not None:
                return pair[1]
        return _SMALL_BATCHES[0][1]

    def add(self, batch_size: int) -> bool:
        """Record a new batch, and one half as large if no other batch has equal operations."""
        is_new = batch_size not in self._traces
        self.record(batch_size)
        if self._partner(batch_size) is None:
            self.record(max(batch_size // 2, 2))
        return is_new

    def estimate(self, batch_size: int) -> Trace:
        """Compute a trace from the nearest recorded batch and the farthest with its operations.

        Raises:
            InputError: no two recorded batches have equal operations.
        """
        near = min(self._traces, key=lambda n: (self._partner(n) is None, abs(n - batch_size)))
        far = self._partner(near) or next(n for n in self._traces if n != near)
        return interpolated((near, self._traces[near]), (far, self._traces[far]), batch_size)

    def _partner(self, batch_size: int) -> int | None:
        """Return the farthest recorded batch whose trace has the events of this batch's trace."""
        alike = [n for n, t in self._traces.items() if t.events is self._traces[batch_size].events]
        return max(alike, key=lambda n: abs(n - batch_size)) if len(alike) > 1 else None


def _bytes_of(model: ModelLike, plan: MemoryPlan) -> Callable[[int], int]:
    """Return a function from the batch size to the peak of the bytes of `plan` beside the model."""
    traces = _Traces(model, plan)
    traces.add_pair()
    own = sum(t.nbytes for t in (*traces.module.parameters(), *traces.module.buffers()))
    return cache(lambda batch_size: max(replay(traces.estimate(batch_size)).high_bytes - own, 0))


def _capacity(device: Device) -> int:
    if device.capacity_bytes is None:
        raise InputError(
            "expected the GPU's memory: give --gpu-memory 80GiB (gpu_memory='80GiB' in Python), "
            "or the GPU's name by --gpu (device= in Python)"
        )
    return device.capacity_bytes


def interpolated(first: tuple[int, Trace], second: tuple[int, Trace], batch_size: int) -> Trace:
    """Compute the trace of a batch size from the traces of two other batch sizes.

    Raises:
        InputError: the model's operations depend on the batch size.
    """
    (n, trace), (other_n, other) = first, second
    if trace.events != other.events:
        raise InputError(
            f"expected a model with the same operations at every batch size, got other operations "
            f"at batch {other_n} than at {n}: predict each batch size instead"
        )

    def line(a: int, b: int) -> int:
        return max(round(a + (b - a) / (other_n - n) * (batch_size - n)), 0)

    buffers = [
        replace(a, n_bytes=line(a.n_bytes, b.n_bytes))
        for a, b in zip(trace.buffers, other.buffers, strict=True)
    ]
    operations = list(trace.operations)
    for index, (a, b) in enumerate(zip(operations, other.operations, strict=True)):
        if a.workspace_high_bytes != b.workspace_high_bytes:
            high = line(a.workspace_high_bytes, b.workspace_high_bytes)
            operations[index] = replace(a, workspace_high_bytes=min(high, HIGH_LIMIT_BYTES))
    return Trace(buffers, operations, trace.events)
