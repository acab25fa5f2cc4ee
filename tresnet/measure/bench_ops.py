"""Time and bandwidth of single operations: ours, eager PyTorch, Inductor, and a plain copy.

The copy moves the same number of bytes as the operation's ideal: what it takes is what the memory
allows. Inputs, outputs and gradients rotate over enough buffers that a GPU's L2 cache does not serve
them. What a contender computes is compared with float64 before it is timed.
"""

import dataclasses
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tresnet import env
from tresnet.errors import InputError, TResNetError
from tresnet.measure.bench import bench_switches
from tresnet.measure.cases import DTYPES
from tresnet.measure.held_clock import Calls, HeldClock
from tresnet.measure.memory import failure_in_short, is_library_failure, is_out_of_memory
from tresnet.measure.ops_table import BLOCK_SIZE, OPS, Function, Inputs, Op, Place
from tresnet.measure.results import BenchInterrupt, check_time_limit
from tresnet.ops import tiles

DIRECTIONS = ("forward", "backward")
_LEAST_SIZE = 8 * BLOCK_SIZE
# All buffers of a kind together hold this many times the L2 cache.
_TIMES_CACHE = 3
_MOST_BUFFERS = 16  # a GPU queues about a thousand kernels, the host waits for room beyond
_CPU_BUFFERS = 2
# A contender may be this much further from float64 than eager PyTorch is, and a little on top: a
# value within rounding of the activation's kink turns the gradient of its pixel.
_ERROR_FACTOR, _ERROR_FLOOR = 3.0, 1e-3
# How the figures came about, for the record.
METHOD = {
    "layout": "channels last, in training; parameters in fp32",
    "ideal_bytes": "feature maps the data flow must read or write, see tresnet.measure.ops_table",
    "copy": "clone of half the ideal bytes: as many moved",
    "buffers": f"{_TIMES_CACHE} times the L2 cache of a GPU, {_MOST_BUFFERS} at most",
    "order": "every repeat visits every contender, forwards and backwards in turn",
    "clock": "CUDA events around all buffers, queued behind a waiting kernel; on a CPU "
    "time.perf_counter",
    "cudnn_benchmark": True,
    "p50": "median over the repeats of the mean over the buffers",
}


@dataclasses.dataclass(frozen=True)
class OpsSettings:
    """What all operations of a run share.

    Attributes:
        device: such as `cuda` or `cpu`.
        batch_size: images.
        input_size: side of the image in pixels; the feature maps follow from it.
        repeats: timed passes over all buffers.
        seed: of the inputs.
        time_limit_s: after it no operation is begun; None for no limit.
        contenders: besides the copy: eager, inductor, this package's implementations; such as
            `triton@warps=8,tile=4096` for kernels cut otherwise, by names of
            `tresnet.ops.tiles.TUNABLE`. Empty for all but these.
    """

    device: str = "cpu"
    batch_size: int = 128
    input_size: int = 224
    repeats: int = 20
    seed: int = 0
    time_limit_s: float | None = None
    contenders: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the numbers and the contenders.

        Raises:
            InputError: one is out of range, or unknown.
        """
        for name, least in (("batch_size", 2), ("repeats", 1)):
            if getattr(self, name) < least:
                raise InputError(f"expected {name} of at least {least}, got {getattr(self, name)}")
        if self.input_size < _LEAST_SIZE or self.input_size % _LEAST_SIZE:
            raise InputError(
                f"expected input_size divisible by {_LEAST_SIZE}, got {self.input_size}"
            )
        check_time_limit(self.time_limit_s)
        known = (
            "copy",
            "eager",
            "inductor",
            *dict.fromkeys(i for op in OPS.values() for i in op.impls),
        )
        for contender in self.contenders:
            if parse_contender(contender)[0] not in known:
                raise InputError(
                    f"expected a contender out of {', '.join(known)}, got {contender!r}"
                )

    def contenders_for(self, op: Op) -> tuple[str, ...]:
        """Those that an operation has, in order, each once."""
        own = ("copy", "eager", "inductor", *op.impls)
        asked = dict.fromkeys(("copy", *self.contenders)) if self.contenders else own
        return tuple(name for name in asked if parse_contender(name)[0] in own)


def parse_contender(text: str) -> tuple[str, dict[str, int]]:
    """`triton@warps=8,tile=4096` to the implementation and how its kernels are cut.

    Raises:
        InputError: a name that cannot be tuned, a number it cannot be, or another contender.
    """
    name, at, options = text.partition("@")
    tuning: dict[str, int] = {}
    for option in options.split(",") if at else ():
        key, _, value = option.partition("=")
        number = int(value) if value.isascii() and value.isdigit() and len(value) < 10 else -1
        if name != "triton" or key not in tiles.TUNABLE or key in tuning or number < 0:
            raise InputError(
                f"expected triton@key=number,... with keys out of {', '.join(tiles.TUNABLE)}, each "
                f"once, got {text!r}"
            )
        least, most, power = tiles.TUNABLE[key]
        if not least <= number <= most or (power and number & (number - 1)):
            kind = "a power of two" if power else "a number"
            raise InputError(f"expected {kind} from {least} to {most} for {key}, got {text!r}")
        tuning[key] = number
    return name, tuning


@dataclasses.dataclass
class OpRow:
    """One operation, one place, one direction, one contender.

    Attributes:
        op: name in the table of operations.
        place: where in a tresnet_m.
        shape: (N, C, H, W) of the input, channels last.
        dtype: of the feature maps; parameters are fp32.
        direction: `forward` (with what it saves for backward) or `backward`.
        contender: `copy`, `eager`, `inductor`, or an implementation of this package, `triton` with
            `@` and how its kernels were cut.
        status: `ok`, `left_out`, `wrong`, `out_of_memory` or `failed`.
        note: why it is not `ok`, or what else to know.
        ideal_bytes: that the operation must move, see `tresnet.measure.ops_table`; 0 where its
            inputs could not be made.
        p50_us: median over the repeats.
        gb_per_s: ideal bytes by that time, in 10^9 bytes.
        share_of_copy: of the copy's bandwidth.
        relative_error: of output and gradients against float64, in the Euclidean norm; None where
            it is not finite.
    """

    op: str
    place: str
    shape: list[int]
    dtype: str
    direction: str
    contender: str
    ideal_bytes: int
    status: str = "ok"
    note: str | None = None
    p50_us: float | None = None
    gb_per_s: float | None = None
    share_of_copy: float | None = None
    relative_error: float | None = None

    def label(self) -> str:
        """The row in one short line."""
        return f"{self.op}, {self.place}, {self.dtype}, {self.direction}, {self.contender}"


def bench_ops(
    names: Sequence[str],
    dtypes: Sequence[str],
    settings: OpsSettings,
    log: Callable[[str], object],
) -> list[OpRow]:
    """Measure operations at all their places.

    Args:
        names: of the table of operations; empty for all.
        dtypes: fp32, bf16 or fp16.
        settings: shared by all.
        log: called with a line of progress.

    Raises:
        InputError: an unknown name, or no such device.
        BenchInterrupt: Ctrl-C, once a place has been measured; it holds the rows of all such.
    """
    for name in names:
        if name not in OPS:
            raise InputError(f"expected an operation out of {', '.join(OPS)}, got {name!r}")
    device, rows = env.timed_device(settings.device), []
    with bench_switches(device, compiling=True):
        try:
            for found in _measured(names or tuple(OPS), dtypes, device, settings, log):
                rows += found
        except KeyboardInterrupt:
            if not rows:
                raise
            raise BenchInterrupt(rows) from None
    return rows


def _measured(
    names: Sequence[str],
    dtypes: Sequence[str],
    device: torch.device,
    settings: OpsSettings,
    log: Callable[[str], object],
) -> Iterator[list[OpRow]]:
    """The rows of one place after the other."""
    began_s = time.perf_counter()
    for name, dtype in itertools.product(names, dtypes):
        for place in OPS[name].places:
            limit_s = settings.time_limit_s
            if settings.contenders and settings.contenders_for(OPS[name]) == ("copy",):
                log(f"{name}, {place.name}, {dtype}: has none of the contenders asked for")
                continue
            if limit_s is not None and time.perf_counter() - began_s > limit_s:
                log(f"{name}, {place.name}, {dtype}: not begun, the time limit has passed")
                continue
            found = measure_place(OPS[name], name, place, dtype, device, settings)
            timed = sum(row.p50_us is not None for row in found)
            log(f"{name}, {place.name}, {dtype}: {timed} of {len(found)} timed")
            yield found


def measure_place(
    op: Op, name: str, place: Place, dtype: str, device: torch.device, settings: OpsSettings
) -> list[OpRow]:
    """Measure one operation at one place in one dtype; call it inside `bench_switches`.

    Where not even the inputs can be made, the rows say so, and other places can go on.
    """
    side = settings.input_size // place.reduction
    shape = (settings.batch_size, place.channels, side, side)
    contenders = settings.contenders_for(op)
    try:
        return _Case(op, name, place, shape, dtype, device, settings, contenders).run()
    except Exception as error:
        if not is_library_failure(error):
            raise
        status = "out_of_memory" if is_out_of_memory(error) else "failed"
        note = failure_in_short(error)
    gc.collect()  # outside the handler: the exception kept the tensors alive
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return [
        OpRow(name, place.name, list(shape), dtype, direction, contender, 0, status, note)
        for direction in DIRECTIONS
        for contender in contenders
    ]


class _Case:
    """One operation at one place in one dtype."""

    def __init__(
        self,
        op: Op,
        name: str,
        place: Place,
        shape: tuple[int, int, int, int],
        dtype: str,
        device: torch.device,
        settings: OpsSettings,
        contenders: Sequence[str],
    ) -> None:
        self._op = op
        self._device, self._settings = device, settings
        self._clock = HeldClock(device)
        torch.manual_seed(settings.seed)
        self._inputs = self._op.make(shape, place, DTYPES[dtype], device)
        with torch.no_grad():
            y = self._op.reference(*self._inputs.maps, *self._inputs.vectors)
        grad = torch.randn(y.shape, device=device)
        self._grad = grad.to(y.dtype, memory_format=_layout(self._inputs.maps[0]))
        x_bytes, y_bytes = _size(self._inputs.maps[0]), _size(y)
        ideal = self._op.ideal_bytes(x_bytes, y_bytes)
        self._buffers = _buffers_of(device, x_bytes + y_bytes)
        self._maps = self._rotated(self._inputs.maps)
        self._grads = self._rotated((self._grad,))
        self._sources: dict[int, list[tuple[Tensor, ...]]] = {}
        self._truth = self._computed(self._op.reference, _converted(self._inputs, torch.float64))
        self._allowed = 0.0
        self._rows = [
            OpRow(name, place.name, list(shape), dtype, direction, contender, nbytes)
            for direction, nbytes in zip(DIRECTIONS, ideal, strict=True)
            if nbytes
            for contender in contenders
        ]

    def run(self) -> list[OpRow]:
        """Check, then time every contender in turns."""
        torch.compiler.reset()
        functions: dict[str, Function | None] = {"copy": None}
        # eager first, asked for or not: its error is what others may have
        for contender in dict.fromkeys(("eager", *(row.contender for row in self._rows))):
            if contender != "copy":
                self._guarded(contender, self._set_up, functions)
        self._truth.clear()
        times_s: dict[int, list[float]] = {}
        for number in range(self._settings.repeats + 1):
            turns = list(enumerate(self._rows))
            for index, row in turns if number % 2 == 0 else reversed(turns):
                if row.status == "ok" and row.contender in functions:
                    time_s = self._guarded(row.contender, self._visit, row, functions)
                    if number and time_s is not None:  # the first pass warms up
                        times_s.setdefault(index, []).append(time_s)
        self._summarise(times_s)
        return self._rows

    def _set_up(self, contender: str, functions: dict[str, Function | None]) -> None:
        """Make a contender, and compare what it computes with float64."""
        impl, tuning = parse_contender(contender)
        if contender == "eager":
            function = self._op.reference
        elif contender == "inductor":
            function = torch.compile(self._op.reference, fullgraph=True, dynamic=False)
        elif impl == "triton" and not _times_kernels(self._device):
            raise InputError("the kernels need a GPU: interpreted, their time says nothing")
        else:
            function = self._op.ours(impl)
        with tiles.tuned(tuning):
            error = _relative_error(self._computed(function, self._inputs), self._truth)
        if contender == "eager":
            self._allowed = _ERROR_FACTOR * error + _ERROR_FLOOR
        for row in self._rows:
            if row.contender == contender:
                row.relative_error = error if math.isfinite(error) else None
                if not error <= self._allowed:
                    row.status = "wrong"
                    row.note = f"relative error {error:.2g}, allowed are {self._allowed:.2g}"
        functions[contender] = function

    def _visit(self, contender: str, row: OpRow, functions: dict[str, Function | None]) -> float:
        late = self._clock.late_blocks
        function = functions[contender]
        with tiles.tuned(parse_contender(contender)[1]):
            if function is None:
                time_s = self._clock.seconds_per_call(lambda: self._copies(row.ideal_bytes))
            elif row.direction == "forward":
                time_s = self._clock.seconds_per_call(lambda: self._forwards(function))
            else:
                time_s = self._clock.seconds_per_call(lambda: self._backwards(function))
        if self._clock.late_blocks > late:
            row.note = "the host was slower than the device: its time is counted"
        return time_s

    def _guarded(self, contender: str, action: Callable[..., Any], *arguments: Any) -> Any:
        """Do `action`; what fails ends this contender alone."""
        try:
            return action(contender, *arguments)
        except TResNetError as error:
            status, note = "left_out", str(error)
        except Exception as error:
            if not is_library_failure(error):
                raise
            status, note = "out_of_memory" if is_out_of_memory(error) else "failed", str(error)
        for row in self._rows:
            if row.contender == contender:
                row.status, row.note = status, (note.strip() or status).splitlines()[0]
        return None

    def _computed(self, function: Function, inputs: Inputs) -> list[Tensor]:
        """Output and gradients."""
        y = function(*inputs.maps, *inputs.vectors)
        wanted = inputs.differentiated()
        if not wanted:
            return [y]
        return [y.detach(), *torch.autograd.grad(y, wanted, self._grad.to(y.dtype))]

    def _copies(self, nbytes: int) -> Calls:
        if nbytes not in self._sources:
            source = torch.zeros(nbytes // 2, dtype=torch.uint8, device=self._device)
            self._sources[nbytes] = self._rotated((source,))
        return [lambda x=x: x.clone() for (x,) in self._sources[nbytes]]

    def _forwards(self, function: Function) -> Calls:
        vectors = self._inputs.vectors
        return [lambda maps=maps: function(*maps, *vectors) for maps in self._maps]

    def _backwards(self, function: Function) -> Calls:
        calls = []
        for maps, (grad,) in zip(self._maps, self._grads, strict=True):
            inputs = Inputs(maps, self._inputs.vectors)
            y = function(*inputs.maps, *inputs.vectors)
            wanted = inputs.differentiated()
            calls.append(lambda y=y, wanted=wanted, g=grad: torch.autograd.grad(y, wanted, g))
        return calls

    def _rotated(self, tensors: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        """Copies of `tensors`, as many as a pass goes round."""
        return [
            tuple(one.detach().clone().requires_grad_(one.requires_grad) for one in tensors)
            for _ in range(self._buffers)
        ]

    def _summarise(self, times_s: dict[int, list[float]]) -> None:
        for index, row in enumerate(self._rows):
            if row.status == "ok" and index in times_s:
                seconds = statistics.median(times_s[index])
                row.p50_us, row.gb_per_s = seconds * 1e6, row.ideal_bytes / seconds / 1e9
        copies = {row.direction: row.gb_per_s for row in self._rows if row.contender == "copy"}
        for row in self._rows:
            copied = copies[row.direction]
            if row.gb_per_s is not None and copied is not None:
                row.share_of_copy = row.gb_per_s / copied


def _times_kernels(device: torch.device) -> bool:
    return device.type == "cuda"


def _buffers_of(device: torch.device, touched_bytes: int) -> int:
    """How many buffers a pass goes round so that the cache holds none of them."""
    if device.type != "cuda":
        return _CPU_BUFFERS
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return min(_MOST_BUFFERS, max(2, math.ceil(_TIMES_CACHE * cache_bytes / touched_bytes)))


def _converted(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The same values in another dtype; integers stay."""

    def convert(one: Tensor) -> Tensor:
        made = one.detach().to(dtype if one.is_floating_point() else one.dtype, copy=True)
        return made.requires_grad_(one.requires_grad)

    return Inputs(tuple(map(convert, inputs.maps)), tuple(map(convert, inputs.vectors)))


def _layout(x: Tensor) -> torch.memory_format:
    """That of the table's inputs, unless these were made contiguous."""
    plain = x.is_contiguous() and not x.is_contiguous(memory_format=torch.channels_last)
    return torch.contiguous_format if plain else torch.channels_last


def _relative_error(found: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The largest of the relative errors of the tensors, in the Euclidean norm; NaN if one is."""
    errors = [
        float((a.to(b.dtype) - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)
    ]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def _size(x: Tensor) -> int:
    return x.numel() * x.element_size()
