"""`tresnet bench ops`: single operations, ours against eager PyTorch, Inductor and a plain copy.

The copy moves the same number of bytes as the operation's ideal: what it takes is what the memory
allows. Inputs, outputs and gradients rotate over enough buffers that a GPU's L2 cache does not serve
them. What a contender computes is compared with float64 before it is timed.
"""

import dataclasses
import functools
import itertools
import math
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tresnet import env
from tresnet.errors import InputError, TResNetError
from tresnet.measure.clock import Calls, HeldClock
from tresnet.measure.ops_table import BLOCK_SIZE, OPS, Function, Inputs, Place
from tresnet.measure.records import RecordFile
from tresnet.measure.runner import (
    Contender,
    Group,
    NoResultError,
    Outcome,
    Rounds,
    RunSettings,
    check_numbers,
    run,
    searching_algorithms,
)
from tresnet.ops import tiles

DIRECTIONS = ("forward", "backward")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
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
    "order": "every round visits every contender, forwards and backwards in turn",
    "clock": "CUDA events around all buffers, queued behind a waiting kernel; on a CPU "
    "time.perf_counter",
    "cudnn_benchmark": "all plans (benchmark_limit 0)",
    "p50": "median over the rounds of the mean over the buffers",
}


@dataclasses.dataclass(frozen=True)
class OpsSettings:
    """What all operations of a run share.

    Attributes:
        device: such as `cuda` or `cpu`.
        dtypes: of the feature maps; parameters are fp32. Empty for bf16 on a GPU, fp32 on a CPU.
        batch_size: images.
        input_size: side of the image in pixels; the feature maps follow from it.
        seed: of the inputs.
        contenders: besides the copy: eager, inductor, this package's implementations; such as
            `triton@warps=8,tile=4096` for kernels cut otherwise, by names of
            `tresnet.ops.tiles.TUNABLE`. Empty for all but these.
    """

    device: str = "cpu"
    dtypes: tuple[str, ...] = ()
    batch_size: int = 128
    input_size: int = 224
    seed: int = 0
    contenders: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the numbers and the contenders.

        Raises:
            InputError: one is out of range, or unknown.
        """
        check_numbers(self, batch_size=2)
        if self.input_size < _LEAST_SIZE or self.input_size % _LEAST_SIZE:
            raise InputError(
                f"expected input_size divisible by {_LEAST_SIZE}, got {self.input_size}"
            )
        impls = dict.fromkeys(impl for op in OPS.values() for impl in op.impls)
        known = ("copy", "eager", "inductor", *impls)
        for contender in self.contenders:
            if parse_contender(contender)[0] not in known:
                raise InputError(
                    f"expected a contender out of {', '.join(known)}, got {contender!r}"
                )

    def contenders_for(self, name: str) -> tuple[str, ...]:
        """Those that an operation has, in order, each once; none if none of those asked for."""
        own = ("copy", "eager", "inductor", *OPS[name].impls)
        if not self.contenders:
            return own
        asked = [one for one in self.contenders if parse_contender(one)[0] in own]
        return tuple(dict.fromkeys(("copy", *asked))) if set(asked) - {"copy"} else ()


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


def bench_ops(
    names: Sequence[str],
    settings: OpsSettings,
    running: RunSettings,
    *,
    output_dir: str | os.PathLike[str],
    argv: Sequence[str],
    log: Callable[[str], object],
) -> tuple[Outcome, RecordFile]:
    """Measure operations at all their places and record it.

    Args:
        names: of the table of operations; empty for all, the heaviest first.
        settings: shared by all.
        running: rounds and time limits.
        output_dir: of the record.
        argv: the command line, for the record.
        log: called with a line of progress.

    Raises:
        InputError: an unknown name, no such device, or nothing to measure.
    """
    check_numbers(running, rounds=1)
    device = env.timed_device(settings.device)
    groups = ops_groups(names, settings, device)
    record = RecordFile(
        output_dir,
        "bench_ops",
        device=device,
        settings={**dataclasses.asdict(settings), **dataclasses.asdict(running), "method": METHOD},
        warmup_steps=1,
        runs=running.rounds,
        argv=argv,
    )
    compiles = any(one.columns["contender"] == "inductor" for group in groups for one in group)
    with searching_algorithms():
        outcome = run(groups, running, log=log, save=record.write, device=device, compiles=compiles)
    return outcome, record


def ops_groups(names: Sequence[str], settings: OpsSettings, device: torch.device) -> list[Group]:
    """The contenders, grouped by operation, dtype and place."""
    for name in names:
        if name not in OPS:
            raise InputError(f"expected an operation out of {', '.join(OPS)}, got {name!r}")
    dtypes = settings.dtypes or (("bf16",) if device.type == "cuda" else ("fp32",))
    groups: list[Group] = []
    for name, dtype in itertools.product(names or tuple(OPS), dtypes):
        for place in OPS[name].places if settings.contenders_for(name) else ():
            shared = _Shared(name, place, dtype, device, settings)
            backward = OPS[name].ideal_bytes(1, 1)[1] > 0
            groups.append(
                [
                    _OpContender(shared, contender, direction)
                    for direction in DIRECTIONS[: 1 + backward]
                    for contender in settings.contenders_for(name)
                ]
            )
    if not groups:
        raise InputError(
            f"expected an operation that has a contender out of {', '.join(settings.contenders)}, "
            f"got {', '.join(names) or 'none'}"
        )
    return groups


class _Shared:
    """Inputs, gradients and truth of an operation at a place, made at their first use."""

    def __init__(
        self, name: str, place: Place, dtype: str, device: torch.device, settings: OpsSettings
    ) -> None:
        side = settings.input_size // place.reduction
        self.name, self.place, self.dtype, self.device = name, place, dtype, device
        self.op, self.shape = OPS[name], (settings.batch_size, place.channels, side, side)
        self.clock = HeldClock(device)
        self.users: set[object] = set()
        self._seed = settings.seed
        self._functions: dict[str, tuple[Function, float]] = {}

    @functools.cached_property
    def inputs(self) -> Inputs:
        torch.manual_seed(self._seed)
        return self.op.make(self.shape, self.place, DTYPES[self.dtype], self.device)

    @functools.cached_property
    def output(self) -> Tensor:
        with torch.no_grad():
            return self.op.reference(*self.inputs.maps, *self.inputs.vectors)

    @functools.cached_property
    def grad(self) -> Tensor:
        grad = torch.randn(self.output.shape, device=self.device)
        return grad.to(self.output.dtype, memory_format=torch.channels_last)

    @functools.cached_property
    def truth(self) -> list[Tensor]:
        return self.computed(self.op.reference, _converted(self.inputs, torch.float64))

    @functools.cached_property
    def allowed(self) -> float:
        """The largest error, by that of eager PyTorch."""
        found = self.computed(self.op.reference, self.inputs)
        return _ERROR_FACTOR * _relative_error(found, self.truth) + _ERROR_FLOOR

    @functools.cached_property
    def buffers(self) -> tuple[list[tuple[Tensor, ...]], list[tuple[Tensor, ...]]]:
        """Copies of the maps and of the gradient, as many as a pass goes round."""
        return self.rotated(self.inputs.maps), self.rotated((self.grad,))

    def ideal_bytes(self, direction: str) -> int:
        """Of one pass."""
        ideal = self.op.ideal_bytes(_size(self.inputs.maps[0]), _size(self.output))
        return ideal[DIRECTIONS.index(direction)]

    def computed(self, function: Function, inputs: Inputs) -> list[Tensor]:
        """Output and gradients."""
        y = function(*inputs.maps, *inputs.vectors)
        wanted = inputs.differentiated()
        if not wanted:
            return [y]
        return [y.detach(), *torch.autograd.grad(y, wanted, self.grad.to(y.dtype))]

    def checked(self, contender: str) -> tuple[Function, float]:
        """A contender's function, and how far it is from the truth."""
        if contender not in self._functions:
            function = self._function(contender)
            error = _relative_error(self.computed(function, self.inputs), self.truth)
            self._functions[contender] = function, error
        return self._functions[contender]

    def _function(self, contender: str) -> Function:
        impl = parse_contender(contender)[0]
        if impl == "eager":
            return self.op.reference
        if impl == "inductor":
            return torch.compile(self.op.reference, fullgraph=True, dynamic=False)
        if impl == "triton" and not _times_kernels(self.device):
            raise InputError("the kernels need a GPU: interpreted, their time says nothing")
        return self.op.ours(impl)

    def rotated(self, tensors: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        """Copies of `tensors`, enough that the cache holds none of them."""
        count = _buffers_of(self.device, _size(self.inputs.maps[0]) + _size(self.output))
        return [
            tuple(one.detach().clone().requires_grad_(one.requires_grad) for one in tensors)
            for _ in range(count)
        ]

    def left_by(self, user: object) -> None:
        """Free everything when the last contender is done."""
        self.users.discard(user)
        if not self.users:
            self._functions.clear()
            for name in ("inputs", "output", "grad", "truth", "allowed", "buffers"):
                self.__dict__.pop(name, None)


class _OpContender(Contender):
    """One contender in one direction."""

    ratio_column = "share_of_copy"

    def __init__(self, shared: _Shared, contender: str, direction: str) -> None:
        self._shared, self._contender = shared, contender
        self.compared_with = direction
        self._calls: Callable[[], Calls] = tuple
        self._tuning = parse_contender(contender)[1]
        self.columns = {
            "op": shared.name,
            "place": shared.place.name,
            "shape": list(shared.shape),
            "dtype": shared.dtype,
            "direction": direction,
            "contender": contender,
            "ideal_bytes": None,
            "relative_error": None,
            "note": None,
        }
        self.label = f"{shared.name}, {shared.place.name}, {shared.dtype}, {direction}, {contender}"
        shared.users.add(self)

    def set_up(self) -> None:
        """Make the inputs, compare what is computed with float64, and warm up."""
        nbytes = self._shared.ideal_bytes(self.compared_with)
        self.columns["ideal_bytes"] = self.units = nbytes
        if self._contender == "copy":
            source = torch.zeros(nbytes // 2, dtype=torch.uint8, device=self._shared.device)
            sources = self._shared.rotated((source,))
            self._calls = lambda: [x.clone for (x,) in sources]
        else:
            function = self._checked_function()
            kind = self._forwards if self.compared_with == "forward" else self._backwards
            self._calls = lambda: kind(function)
        self.visit()

    def _checked_function(self) -> Function:
        try:
            with tiles.tuned(self._tuning):
                function, error = self._shared.checked(self._contender)
        except TResNetError as refusal:
            raise NoResultError("left_out", str(refusal)) from None
        self.columns["relative_error"] = error if math.isfinite(error) else None
        if not error <= self._shared.allowed:
            allowed = self._shared.allowed
            raise NoResultError("wrong", f"relative error {error:.2g}, allowed are {allowed:.2g}")
        return function

    def visit(self) -> Sequence[float]:
        """Mean time of one pass over the buffers."""
        clock = self._shared.clock
        late = clock.late_blocks
        with tiles.tuned(self._tuning):
            time_s = clock.seconds_per_call(self._calls)
        if clock.late_blocks > late:
            self.columns["note"] = "the host was slower than the device: its time is counted"
        return [time_s]

    def figures(self, rounds: Rounds) -> dict[str, Any]:
        """Median time and bandwidth."""
        times_s = [time_s for visit in rounds for time_s in visit]
        p50_s = statistics.median(times_s) if times_s else None
        return {
            "p50_us": None if p50_s is None else p50_s * 1e6,
            "gb_per_s": None if p50_s is None else self.units / p50_s / 1e9,
        }

    def close(self) -> None:
        """Leave the inputs to the others."""
        self._calls = tuple
        self._shared.left_by(self)

    def _forwards(self, function: Function) -> Calls:
        vectors = self._shared.inputs.vectors
        return [lambda maps=maps: function(*maps, *vectors) for maps in self._shared.buffers[0]]

    def _backwards(self, function: Function) -> Calls:
        calls = []
        for maps, (grad,) in zip(*self._shared.buffers, strict=True):
            inputs = Inputs(maps, self._shared.inputs.vectors)
            y = function(*inputs.maps, *inputs.vectors)
            wanted = inputs.differentiated()
            calls.append(lambda y=y, wanted=wanted, g=grad: torch.autograd.grad(y, wanted, g))
        return calls


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


def _relative_error(found: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The largest of the relative errors of the tensors, in the Euclidean norm; NaN if one is."""
    errors = [
        float((a.to(b.dtype) - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)
    ]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def _size(x: Tensor) -> int:
    return x.numel() * x.element_size()
