"""The largest batch that fits, by bisection on the predictor."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

from torch import nn

from tresnet.errors import InputError
from tresnet.memory.affine import AffineTrace
from tresnet.memory.device import Device, find_device
from tresnet.memory.events import Trace
from tresnet.memory.models import ModelLike, find_model
from tresnet.memory.plan import make_plan
from tresnet.memory.predict import record
from tresnet.memory.replay import held_at_peak_bytes, replay
from tresnet.memory.workspaces import Workspaces

# Two small batches from which all others are foreseen; batch norm refuses one image a batch
# where the last features are 1x1.
_SMALL_BATCHES = (2, 4)
_LIMIT = 2**20
# The share by which the trace itself may be off.
_DOUBT = 0.01


class Fits(StrEnum):
    """Whether a batch fits: certainly, perhaps, certainly not."""

    YES = "yes"
    UNCERTAIN = "uncertain"
    NO = "no"


@dataclass(frozen=True)
class MaxBatch:
    """The answer: `batch_size` fits (0 if not even one image does), from `no_from` on none does.

    What lies between depends on what cannot be known beforehand: the size of the context, and
    the workspaces cuDNN takes. `traced` counts the steps traced to find it.
    """

    batch_size: int
    no_from: int
    device: Device
    traced: int

    def answer(self, batch_size: int) -> Fits:
        """Whether a batch of this size fits."""
        if batch_size <= self.batch_size:
            return Fits.YES
        return Fits.NO if batch_size >= self.no_from else Fits.UNCERTAIN

    def __str__(self) -> str:
        lines = [f"fits: batch {self.batch_size}"]
        if self.no_from - self.batch_size > 1:
            lines.append(f"uncertain: {self.batch_size + 1} to {self.no_from - 1}")
        return "\n".join([*lines, f"does not fit: from {self.no_from} on"])


def fits(trace: Trace, device: Device) -> Fits:
    """Whether the traced step fits into the device.

    Yes if it does with the largest context, both with every workspace at its highest and with
    none (they fragment the cache differently); no if what tensors hold at the peak is more than
    there is, however well it were packed.

    Raises:
        InputError: the device has no stated capacity.
    """
    capacity = _capacity(device)
    worst = int((capacity - device.context_high_bytes) * (1 - _DOUBT))
    if worst > 0 and all(_runs(trace, worst, highest_workspaces=high) for high in (True, False)):
        return Fits.YES
    at_least = held_at_peak_bytes(trace) * (1 - _DOUBT) + device.context_low_bytes
    return Fits.NO if at_least > capacity else Fits.UNCERTAIN


def max_batch(
    model: ModelLike,
    *,
    gpu_memory: str | int | None = None,
    device: str | Device | None = None,
    workspaces: Workspaces | None = None,
    model_options: dict[str, object] | None = None,
    **step: Any,
) -> MaxBatch:
    """Find the largest batch that fits.

    Two small batches are traced; as every buffer grows with the batch by a constant, all others
    follow from them and are bisected. The edges found are then traced themselves.

    Args:
        model: as for `predict`.
        gpu_memory: the GPU's memory, such as `80GiB`.
        device: the GPU, if its memory is not given.
        workspaces: as for `predict`.
        model_options: as for `predict`.
        **step: as for `predict`, without the batch size.

    Raises:
        InputError: neither a memory nor a device with one is given, or as for `predict`.
    """
    described = find_device(device, gpu_memory)
    _capacity(described)
    _, module = find_model(model, model_options)
    tracer = _Tracer(module, step, described, workspaces or Workspaces())
    foreseen = AffineTrace(*((n, tracer.trace(n)) for n in _SMALL_BATCHES))

    @cache
    def foresee(batch_size: int) -> Fits:
        return fits(foreseen.at(batch_size), described)

    yes = _edge(tracer, foresee, lambda answer: answer is Fits.YES)
    no = _edge(tracer, foresee, lambda answer: answer is not Fits.NO)
    return MaxBatch(yes, no + 1, described, tracer.traced)


class _Tracer:
    """Traces of one model by batch size, each answer remembered."""

    def __init__(
        self, model: nn.Module, step: dict[str, Any], device: Device, workspaces: Workspaces
    ) -> None:
        self._model, self._step = model, step
        self._device, self._workspaces = device, workspaces
        self._answers: dict[int, Fits] = {}
        self.traced = 0

    def trace(self, batch_size: int) -> Trace:
        self.traced += 1
        plan = make_plan(self._model, batch_size=batch_size, **self._step)
        return record(self._model, plan, self._device, self._workspaces)

    def answer(self, batch_size: int) -> Fits:
        if batch_size not in self._answers:
            try:
                trace = self.trace(batch_size)
            except InputError:
                # Batch norm in training refuses one image; there is nothing smaller to try.
                if batch_size > 1:
                    raise
                return Fits.NO
            self._answers[batch_size] = fits(trace, self._device)
        return self._answers[batch_size]


def _edge(tracer: _Tracer, foresee: Callable[[int], Fits], good: Callable[[Fits], bool]) -> int:
    """The largest batch whose answer is good: foreseen, then corrected by tracing."""
    edge = _bisect(lambda n: good(foresee(n)), 0, _LIMIT)
    stride = 1
    while edge > 0 and not good(tracer.answer(edge)):
        below = max(edge - stride, 0)
        edge, stride = below, stride * 2
    if stride > 1:
        return _bisect(lambda n: good(tracer.answer(n)), edge, edge + stride)
    stride = 1
    while good(tracer.answer(edge + stride)):
        edge, stride = edge + stride, stride * 2
    return _bisect(lambda n: good(tracer.answer(n)), edge, edge + stride)


def _bisect(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The largest n from `low` on, below `high`, for which `holds`; `low` is taken to hold."""
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def _runs(trace: Trace, capacity_bytes: int, *, highest_workspaces: bool) -> bool:
    replayed = replay(trace, capacity_bytes, highest_workspaces=highest_workspaces)
    return replayed.out_of_memory_event is None


def _capacity(device: Device) -> int:
    if device.capacity_bytes is None:
        raise InputError(
            "expected how much memory the GPU has: give gpu_memory='80GiB' or a device"
        )
    return device.capacity_bytes
