"""`tresnet bench ops`: single operations, ours against eager PyTorch, Inductor and a plain copy.

The copy moves as many bytes as the ideal operation, so its time is the limit of the memory. Inputs,
outputs and gradients rotate over so many buffers that a GPU's L2 cache cannot hold them. Results
are compared with float64 before they are timed.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tresnet import env
from tresnet.errors import InputError
from tresnet.measure.clock import Calls, HeldClock
from tresnet.measure.operations import BLOCK_SIZE, OPS, Function, Inputs, Place
from tresnet.measure.records import RecordFile
from tresnet.measure.runner import (
    Contender,
    Group,
    Log,
    NoResultError,
    Outcome,
    Rounds,
    current,
    run,
    searching_algorithms,
)
from tresnet.measure.settings import OpsSettings
from tresnet.settings import Dtype, torch_dtype

CONTENDERS = ("copy", "eager", "inductor", "triton")
_LEAST_SIZE = 8 * BLOCK_SIZE
# All buffers of a kind together hold this many times the L2 cache.
_TIMES_CACHE = 3
_MOST_BUFFERS = 16  # a GPU's queue holds about a thousand kernels; then the host waits
_CPU_BUFFERS = 2
# A contender's error may be this factor times eager PyTorch's, plus a floor. Near the kink of the
# activation, rounding may select the gradient of the other slope.
_ERROR_FACTOR, _ERROR_FLOOR = 3.0, 1e-3
# Method of the measurement, for the record.
METHOD = {
    "layout": "channels last, in training; parameters in fp32",
    "ideal_bytes": "feature maps the data flow must read or write, see tresnet.measure.operations",
    "copy": "clone of half the ideal bytes: as many moved",
    "buffers": f"{_TIMES_CACHE} times the L2 cache of a GPU, {_MOST_BUFFERS} at most",
    "order": "every round visits every contender, forwards and backwards in turn",
    "clock": "CUDA events around all buffers, queued behind a waiting kernel; on a CPU "
    "time.perf_counter",
    "cudnn_benchmark": "all plans (benchmark_limit 0)",
    "p50": "median over the rounds of the mean over the buffers",
}


def bench_ops(settings: OpsSettings, argv: Sequence[str], log: Log) -> Outcome:
    """Measure and record operations at all their places, or raise InputError."""
    settings.check()
    if settings.input_size < _LEAST_SIZE or settings.input_size % _LEAST_SIZE:
        raise InputError(
            f"expected input_size divisible by {_LEAST_SIZE}, got {settings.input_size}"
        )
    for name in settings.ops:
        if name not in OPS:
            raise InputError(f"expected an operation out of {', '.join(OPS)}, got {name!r}")
    contenders = tuple(dict.fromkeys(("copy", *(settings.contenders or CONTENDERS[1:]))))
    device = env.timed_device(env.device_or_default(settings.device))
    groups: list[Group] = []
    usual: Dtype = "bf16" if device.type == "cuda" else "fp32"
    dtypes = settings.dtype or (usual,)
    for name, dtype in itertools.product(settings.ops or OPS, dtypes):
        for place in OPS[name].places:
            site = _Site(name, place, dtype, device, settings)
            pairs = itertools.product(OPS[name].ideal_bytes(1, 1), contenders)
            groups.append([_OpContender(site, one, direction) for direction, one in pairs])
    record = RecordFile(
        settings.output_dir,
        "bench_ops",
        device=device,
        settings={**settings.to_dict(), "method": METHOD},
        warmup_steps=1,
        runs=settings.rounds,
        argv=argv,
    )
    with searching_algorithms(), current(device):
        return run(groups, settings, log=log, record=record, compiles="inductor" in contenders)


class _Data(NamedTuple):
    inputs: Inputs
    grad: Tensor
    truth: list[Tensor]
    allowed: float
    buffers: list[tuple[tuple[Tensor, ...], Tensor]]


class _Site:
    def __init__(
        self, name: str, place: Place, dtype: Dtype, device: torch.device, settings: OpsSettings
    ) -> None:
        side = settings.input_size // place.reduction
        self.name, self.place, self.device = name, place, device
        self.dtype: Dtype = dtype
        self.op, self.shape = OPS[name], (settings.batch_size, place.channels, side, side)
        self.clock, self._seed = HeldClock(device), settings.seed

    @functools.cached_property
    def data(self) -> _Data:
        torch.manual_seed(self._seed)
        inputs = self.op.make(self.shape, self.place, torch_dtype(self.dtype), self.device)
        with torch.no_grad():
            y = self.op.plain(*inputs.maps, *inputs.vectors)
        grad = torch.randn(y.shape, device=self.device)
        grad = grad.to(y.dtype, memory_format=torch.channels_last)
        exact = Inputs(*(_copied(part, torch.float64) for part in inputs))
        truth = _computed(self.op.plain, exact, grad)
        error = _relative_error(_computed(self.op.plain, inputs, grad), truth)
        count = _buffers_of(self.device, inputs.maps[0].nbytes + y.nbytes)
        buffers = [(_copied(inputs.maps), grad.clone()) for _ in range(count)]
        return _Data(inputs, grad, truth, _ERROR_FACTOR * error + _ERROR_FLOOR, buffers)

    def free(self) -> None:
        self.__dict__.pop("data", None)

    def function(self, contender: str) -> Function:
        if contender == "eager":
            return self.op.plain
        if contender == "inductor":
            return torch.compile(self.op.plain, fullgraph=True, dynamic=False)
        if _times_kernels(self.device):
            return self.op.fused
        raise NoResultError(
            "left_out", "the kernels need a GPU: interpreted, their time says nothing"
        )


class _OpContender(Contender):
    ratio_column = "ratio_to_copy"

    def __init__(self, site: _Site, contender: str, direction: str) -> None:
        self._site, self._contender = site, contender
        self._calls: Callable[[], Calls] = tuple
        self.compared_with = direction
        self.columns = {
            "op": site.name,
            "place": site.place.name,
            "shape": list(site.shape),
            "dtype": site.dtype,
            "direction": direction,
            "contender": contender,
            "ideal_bytes": None,
            "relative_error": None,
            "note": None,
        }
        self.label = f"{site.name}, {site.place.name}, {site.dtype}, {direction}, {contender}"

    def set_up(self) -> None:
        data = self._site.data
        sizes = self._site.op.ideal_bytes(data.inputs.maps[0].nbytes, data.grad.nbytes)
        self.columns["ideal_bytes"] = self.units = sizes[self.compared_with]
        if self._contender == "copy":
            source = torch.zeros(self.units // 2, dtype=torch.uint8, device=self._site.device)
            sources = [source.clone() for _ in data.buffers]
            self._calls = lambda: [x.clone for x in sources]
        else:
            function = self._site.function(self._contender)
            self._check(function, data)
            self._calls = lambda: self._calls_of(function)
        self.visit()

    def _check(self, function: Function, data: _Data) -> None:
        error = _relative_error(_computed(function, data.inputs, data.grad), data.truth)
        self.columns["relative_error"] = error if math.isfinite(error) else None
        if not error <= data.allowed:
            raise NoResultError(
                "wrong", f"relative error {error:.2g}, allowed are {data.allowed:.2g}"
            )

    def visit(self) -> Sequence[float]:
        clock = self._site.clock
        late = clock.late_blocks
        time_s = clock.seconds_per_call(self._calls)
        if clock.late_blocks > late:
            self.columns["note"] = "the host was slower than the device: its time is counted"
        return [time_s]

    def figures(self, rounds: Rounds) -> dict[str, Any]:
        times_s = [time_s for visit in rounds for time_s in visit]
        if not times_s:
            return {"p50_us": None, "gb_per_s": None}
        p50_s = statistics.median(times_s)
        return {"p50_us": p50_s * 1e6, "gb_per_s": self.units / p50_s / 1e9}

    def close(self) -> None:
        self._calls = tuple
        self._site.free()

    def _calls_of(self, function: Function) -> Calls:
        """Return one call for each buffer; for backward the forward runs here."""
        calls, inputs = [], self._site.data.inputs
        for maps, grad in self._site.data.buffers:
            call = functools.partial(function, *maps, *inputs.vectors)
            if self.compared_with == "backward":
                wanted = inputs._replace(maps=maps).differentiated()
                call = functools.partial(torch.autograd.grad, call(), wanted, grad)
            calls.append(call)
        return calls


def _times_kernels(device: torch.device) -> bool:
    return device.type == "cuda"


def _buffers_of(device: torch.device, touched_bytes: int) -> int:
    if device.type != "cuda":
        return _CPU_BUFFERS
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return min(_MOST_BUFFERS, max(2, math.ceil(_TIMES_CACHE * cache_bytes / touched_bytes)))


def _computed(function: Function, inputs: Inputs, grad: Tensor) -> list[Tensor]:
    y = function(*inputs.maps, *inputs.vectors)
    wanted = inputs.differentiated()
    return [y.detach(), *(torch.autograd.grad(y, wanted, grad.to(y.dtype)) if wanted else ())]


def _copied(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    return tuple(
        one.detach()
        .to(dtype if dtype and one.is_floating_point() else one.dtype, copy=True)
        .requires_grad_(one.requires_grad)
        for one in tensors
    )


def _relative_error(found: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """Return the largest relative error in the Euclidean norm; NaN if any is NaN."""
    errors = [
        float((a.to(b.dtype) - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)
    ]
    return math.nan if any(map(math.isnan, errors)) else max(errors)
