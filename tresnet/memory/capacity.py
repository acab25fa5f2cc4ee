"""Decision whether a batch fits into a GPU's memory, and search for the largest batch that fits.

Tensors grow linearly with the batch size, so any trace can be computed from two recorded traces.
A search over computed traces estimates the largest batch. Recorded traces then correct it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, lru_cache
from typing import Any

from torch import nn

from tresnet.errors import InputError
from tresnet.memory.device import Device
from tresnet.memory.plan import MemoryPlan, ModelLike, make_plan, plan_of
from tresnet.memory.prediction import RELATIVE_ERROR, record
from tresnet.memory.replay import peak_live_bytes, replay
from tresnet.memory.trace import Trace
from tresnet.memory.workspaces import HIGH_LIMIT_BYTES
from tresnet.search import find_edge

# Pairs of batch sizes, to interpolate traces. If a pair's operations differ, the next pair is used:
# for example, tresnet_l pads its channels for 4 or more images of 448 pixels. No pair has a batch
# of 1, because batch norm in training rejects a single image with 1x1 features.
_SMALL_BATCHES = ((2, 4), (16, 32), (128, 256))


class Fits(StrEnum):
    """Whether a batch fits into the memory of a device."""

    YES = "yes"
    UNCERTAIN = "uncertain"
    NO = "no"


@dataclass(frozen=True)
class MaxBatch:
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
    _, recorded = _recorder(model, replace(plan, batch_size=1))
    beside_bytes = _bytes_of(model, evaluation) if evaluation is not None else lambda _: 0

    @cache
    def confirm(batch_size: int) -> Fits:
        try:
            return fits(recorded(batch_size), device, beside_bytes(batch_size))
        except InputError:
            if batch_size > 1:
                raise
            return Fits.NO  # batch norm in training may reject a batch of one image

    def same_operations(sizes: tuple[int, int]) -> bool:
        return recorded(sizes[0]).events == recorded(sizes[1]).events

    def estimate_from(sizes: tuple[int, int]) -> Callable[[int], Fits]:
        first, second = ((n, recorded(n)) for n in sizes)
        trace = interpolated(first, second)
        return cache(lambda size: fits(trace(size), device, beside_bytes(size)))

    small = next(filter(same_operations, _SMALL_BATCHES), _SMALL_BATCHES[-1])
    estimate = estimate_from(small)
    batch_size = find_edge(lambda n: estimate(n) is Fits.YES, 1)
    if batch_size > 3 and not same_operations((batch_size, small[1])):
        large = batch_size // 2, batch_size
        if same_operations(large):
            estimate = estimate_from(large)

    def largest(accepts: Callable[[Fits], bool]) -> int:
        start = find_edge(lambda n: accepts(estimate(n)), 1)
        return find_edge(lambda n: accepts(confirm(n)), start)

    fitting = largest(lambda answer: answer is Fits.YES)
    return MaxBatch(fitting, largest(lambda answer: answer is not Fits.NO) + 1, device)


def _recorder(model: ModelLike, plan: MemoryPlan) -> tuple[nn.Module, Callable[[int], Trace]]:
    """Return the model, and a function from the batch size to the trace of the step of `plan`."""
    _, module, step = make_plan(model, plan)
    device = step.gpu
    trace = lambda size: record(module, replace(step, batch_size=size), device)  # noqa: E731
    return module, lru_cache(maxsize=4)(trace)


def _bytes_of(model: ModelLike, plan: MemoryPlan) -> Callable[[int], int]:
    """Return a function from the batch size to the peak of the bytes of `plan` beside the model."""
    module, recorded = _recorder(model, plan)

    def same_operations(sizes: tuple[int, int]) -> bool:
        return recorded(sizes[0]).events == recorded(sizes[1]).events

    small = next(filter(same_operations, _SMALL_BATCHES[1:]), _SMALL_BATCHES[0])
    first, second = ((n, recorded(n)) for n in small)
    trace = interpolated(first, second)
    own = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    return cache(lambda batch_size: max(replay(trace(batch_size)).high_bytes - own, 0))


def _capacity(device: Device) -> int:
    if device.capacity_bytes is None:
        raise InputError(
            "expected the GPU's memory: give --gpu-memory 80GiB (gpu_memory='80GiB' in Python), "
            "or the GPU's name by --gpu (device= in Python)"
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
            f"expected a model with the same operations at every batch size, got other operations "
            f"at batch {other_n} than at {n}: predict each batch size instead"
        )

    def at(batch_size: int) -> Trace:
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

    return at
