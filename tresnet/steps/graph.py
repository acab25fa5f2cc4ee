"""CUDA graphs of a training micro-batch or an inference: one launch instead of a thousand.

The first batches of a shape run eagerly. The next batch also runs eagerly. Then its operations are
captured, but not executed. The batch after it is replayed and run eagerly, to compare the results.
If the results agree, later batches are replayed. If not, or if the capture fails, later batches run
eagerly, and a message says why. Optimizer, schedule, EMA and scaler stay outside the graph.
"""

import contextlib
import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from tresnet.errors import ConfigError
from tresnet.layers.norm import running_stats_frozen
from tresnet.settings import Compute
from tresnet.steps.compiled import CUDA_GRAPH_MODES

WARMUP_RUNS = 3  # the number in the example of PyTorch's notes on CUDA graphs
WARMUP_RUNS_DDP = 11  # DistributedDataParallel rebuilds gradient buckets after the first runs
CHECKED_AFTER = 2  # number of runs after the warm-up: one is captured, the next is compared
# Limit of captures. 8 is a guess: gradient accumulation with two image shapes needs 6 graphs.
_MOST_GRAPHS = 8
# A replay may differ from an eager run by four times the difference of two eager runs, plus this
# fraction of the eager result. All tensors are compared as one: single tensors vary too much.
_CLOSE = 1e-3
_UNKNOWN = "no finite numbers to compare"  # in fp16, until the scaler has lowered its scale

Say = Callable[[str], object]
Run = Callable[..., Sequence[Tensor]]


class CudaCapturer:
    """Captures CUDA graphs on a stream of its own, with one memory pool for all graphs."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._used = torch.cuda.Event()

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """Run the body of `with` on the capture stream, in order with the current stream."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Run the body of `with` on the current stream, after the previous `in_turn` block."""
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_event(self._used)
        yield
        self._used.record(current)

    def capture(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Capture `function`; return its result, and a function that replays the graph.

        If a capture fails at its end, PyTorch does not restore the current stream, the random
        generator and the allocator. This method restores all three.
        """
        graph, device = torch.cuda.CUDAGraph(), self._stream.device
        generator = torch.cuda.default_generators[device.index]
        before = generator.clone_state()
        # "thread_local": the loader's thread that pins batches may call CUDA during the capture.
        options: Any = {"stream": self._stream, "capture_error_mode": "thread_local"}
        try:
            with (
                torch.cuda.stream(torch.cuda.current_stream(device)),
                torch.cuda.graph(graph, self._pool, **options),
            ):
                found = function()
        except Exception:
            generator.graphsafe_set_state(before)
            with contextlib.suppress(RuntimeError):  # raised if allocation has already ended
                torch._C._cuda_endAllocateToPool(device.index, self._pool)
            raise
        return found, graph.replay

    def same_random_numbers(self) -> AbstractContextManager[Any]:
        """Return a context that restores the random generators of CPU and GPU at its end."""
        return torch.random.fork_rng([self._stream.device])


def uses_graph(compute: Compute, device: torch.device, captures: bool = True) -> bool:
    """Return whether a step on `device` tries CUDA graphs.

    With `cuda_graph` 'auto', an eager model on a GPU uses graphs if `captures`. With 'on',
    `ConfigError` is raised without a GPU or for a mode of `torch.compile` that makes CUDA graphs.
    """
    if compute.cuda_graph == "auto":
        return captures and device.type == "cuda" and compute.compile == "none"
    if compute.cuda_graph == "on" and device.type != "cuda":
        raise ConfigError(f"--cuda-graph on: expected a GPU, got device {device}: choose auto")
    if compute.cuda_graph == "on" and compute.compile in CUDA_GRAPH_MODES:
        raise ConfigError(
            f"--cuda-graph on: --compile {compute.compile} makes graphs of its own: choose one, or"
            " --compile default"
        )
    return compute.cuda_graph == "on"


_attributes = attrgetter("__dict__")
_members = itemgetter("_modules", "_parameters", "_buffers")
_hooks = itemgetter(
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
)
_tensor_hooks = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_trains = attrgetter("requires_grad")
# Global flags by which PyTorch chooses kernels.
_flags = attrgetter(
    "cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic", "cudnn.conv.fp32_precision",
    "cuda.matmul.fp32_precision", "cuda.matmul.allow_fp16_accumulation",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
)  # fmt: skip


class _Reading:
    """State of a model or criterion on which captured graphs depend.

    A replay reads memory at the captured addresses. Therefore `holds` is called before each replay.
    `parameters` lists each parameter once.
    """

    def __init__(self, root: nn.Module) -> None:
        self._modules = [root]
        for module in self._modules:  # the loop appends the children of each module
            children = module.__dict__["_modules"].values()
            self._modules += (child for child in children if child is not None)
        self._kinds_and_members = self._read_kinds_and_members()
        self._tensors = [t for t in self._kinds_and_members if isinstance(t, Tensor)]
        parameters = (m.__dict__["_parameters"].values() for m in self._modules)
        self.parameters = [p for p in dict.fromkeys(chain(*parameters)) if p is not None]
        self._copies = [dict(attributes) for attributes in map(_attributes, self._modules)]
        self._values = self._read_values()

    def _read_kinds_and_members(self) -> list[Any]:
        members = filter(None, chain.from_iterable(map(_members, map(_attributes, self._modules))))
        return [*map(type, self._modules), *chain.from_iterable(m.values() for m in members)]

    def _read_values(self) -> list[Any]:
        return [*map(Tensor.data_ptr, self._tensors), *map(_trains, self.parameters)]

    def holds(self) -> bool:
        """Return whether the modules are unchanged since `__init__` read their state."""
        now = self._read_kinds_and_members()
        if not _same(now, self._kinds_and_members):
            return False
        try:
            unchanged = [*map(_attributes, self._modules)] == self._copies
        except (RuntimeError, ValueError):  # raised by == of tensors or arrays
            return False
        return unchanged and self._read_values() == self._values

    def is_hooked(self) -> bool:
        """Return whether modules or parameters have hooks, which a replay would skip."""
        of_modules = chain.from_iterable(map(_hooks, map(_attributes, self._modules)))
        of_tensors = chain.from_iterable(map(_tensor_hooks, self.parameters))
        return bool(torch_module._has_any_global_hook()) or any(of_modules) or any(of_tensors)


@dataclass
class _Graph:
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    gradients: list[Tensor | None]
    replay: Callable[[], None]
    criterion: _Reading
    checked: bool = False  # whether a replay has agreed with an eager run


class Graphs:
    """Runs one model: eagerly at first and for rare shapes, otherwise by replaying CUDA graphs.

    Each batch is copied into the inputs of a graph, and the graph's outputs are copied out. In
    training, the graph of an optimizer step's first micro-batch sets the gradients. Graphs of later
    micro-batches add to the gradients. `replayed` says whether the last run was a replay.
    """

    def __init__(
        self,
        model: nn.Module,
        capturer: CudaCapturer,
        *,
        trains: bool,
        warmup_runs: int = WARMUP_RUNS,
        agree: Callable[[bool], bool] | None = None,
        say: Say | None = None,
    ) -> None:
        """Store the arguments; `model` is not wrapped in DistributedDataParallel.

        A shape is captured after `warmup_runs` eager runs. With `trains`, only consecutive runs of
        a shape count. `agree(x)` returns whether x is true in all processes; None means that there
        is one process. With `agree`, a failed capture raises, because other processes would wait.
        `say` receives a message about each decision.
        """
        self.replayed = False
        self._model, self._capturer = model, capturer
        self._trains, self._warmup_runs, self._agree = trains, warmup_runs, agree
        self._say = logging.getLogger(__name__).info if say is None else say
        self._lock = threading.Lock()
        self._graphs: dict[Any, _Graph] = {}
        self._seen: Counter[Any] = Counter()
        self._left = _MOST_GRAPHS  # captures that are still allowed; the limit saves memory
        self._read()

    def __call__(
        self,
        run: Run,
        inputs: Sequence[Tensor],
        criterion: object = None,
        micro_batches: int = 1,
        is_last: bool = True,
    ) -> Sequence[Tensor]:
        """Return the results of `run(*inputs)`; in training, `run` adds to the gradients.

        Each layout of `inputs` has its own graph for each combination of `criterion`,
        `micro_batches` and `is_last`. `TrainingStep.backward` explains these three arguments.
        """
        with self._lock, self._capturer.in_turn():
            self.replayed = False
            if not self._reading.holds():
                self._read()
            held = self._gradients()
            is_first = all(gradient is None for gradient in held)
            layouts = [(x.shape, x.stride(), x.dtype) for x in inputs]
            shape = *layouts, criterion, micro_batches, *_surroundings()
            if self._trains and shape not in self._seen:
                self._seen.clear()  # so that an epoch's smaller last batch never gets a graph
            self._seen[shape] += 1
            key = shape, is_first, is_last
            graph = self._graphs.get(key)
            if graph is not None and (graph.criterion.is_hooked() or not graph.criterion.holds()):
                self._read()
                graph = None
            # A replay would call no hook, and would give the inputs no gradient.
            replays = not self._reading.is_hooked() and not any(map(_trains, inputs))
            if graph is not None and replays and (is_first or _same(held, graph.gradients)):
                if not graph.checked:
                    del graph
                    return self._compare(key, run, inputs, held)
                self.replayed = True
                return self._replay(graph, inputs)
            frequent = self._seen[shape] > self._warmup_runs and self._left > 0
            # A later micro-batch is captured only if it adds to gradient tensors of another graph.
            starts = is_first or any(_same(held, g.gradients) for g in self._graphs.values())
            captures = graph is None and replays and frequent and starts
            with self._stream(captures):
                found = run(*inputs)
            if captures:
                gradients = self._gradients()
                self._set_gradients(held)
                self._capture(key, run, inputs, criterion)
                self._set_gradients(gradients)
                self._take_over(key)
            return found

    def _read(self) -> None:
        """Read the state of the model, and drop all graphs that were captured before."""
        self._reading = _Reading(self._model)
        self._parameters = self._reading.parameters if self._trains else []
        self._graphs.clear()
        self._seen.clear()

    def _capture(self, key: Any, run: Run, inputs: Sequence[Tensor], criterion: object) -> None:
        modules = [criterion] if isinstance(criterion, nn.Module) else []
        reading = _Reading(nn.ModuleList(modules))
        is_known = modules or criterion is None or _is_constant(criterion)
        if not is_known or reading.is_hooked() or any(map(_trains, reading.parameters)):
            self._give_up(
                "expected a criterion that is a module without hooks and trained parameters, or a "
                f"function that holds nothing but numbers and strings, got {criterion!r}"
            )
            return
        self._left -= 1
        try:
            own = [x.clone() for x in inputs]
            outputs, replay = self._capturer.capture(lambda: run(*own))
        except Exception as error:
            if self._agree is not None:
                raise
            self._give_up(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            return
        self._graphs[key] = _Graph(own, outputs, self._gradients(), replay, reading)
        if not self._left:
            self._say(
                f"has captured {_MOST_GRAPHS} CUDA graphs, as many as it may: other shapes and "
                "settings run eagerly from now on"
            )

    def _replay(self, graph: _Graph, inputs: Sequence[Tensor]) -> list[Tensor]:
        for own, given in zip(graph.inputs, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        graph.replay()
        self._set_gradients(graph.gradients)
        return [output.clone() for output in graph.outputs]

    def _compare(
        self, key: Any, run: Run, inputs: Sequence[Tensor], held: list[Tensor | None]
    ) -> Sequence[Tensor]:
        """Compare a replay with two eager runs; return the results of the second eager run."""
        buffers = list(self._model.buffers()) if self._trains else []
        sums = [gradient for gradient in held if gradient is not None]
        start = [[t.clone() for t in tensors] for tensors in (buffers, sums)]

        def results(function: Callable[[], Sequence[Tensor]]) -> list[Sequence[Tensor]]:
            for tensors, kept in zip((buffers, sums), start, strict=True):
                if tensors:
                    torch._foreach_copy_(tensors, kept)
            self._set_gradients(held)
            outputs = function()
            gradients = [g.clone() for g in self._gradients() if g is not None]
            return [outputs, [b.to(torch.float64, copy=True) for b in buffers], gradients]

        runs = []
        with self._stream():
            try:
                with self._capturer.same_random_numbers():
                    runs.append(results(lambda: self._replay(self._graphs[key], inputs)))
                with self._capturer.same_random_numbers():
                    runs.append(results(lambda: run(*inputs)))
            except torch.OutOfMemoryError:
                if self._agree is not None:
                    raise
                runs.clear()
                self._give_up("no memory for a graph beside an eager run")
            eager = results(lambda: run(*inputs))
        if runs:
            names = "outputs", "buffers", "gradients"
            rows = zip(names, *runs, eager, ((), (), start[1]), strict=True)
            self._judge(key, [_difference(*row) for row in rows], len(inputs[0]))
        self._take_over(key)
        return eager[0]

    def _judge(self, key: Any, found: list[str | None], count: int) -> None:
        """Accept the graph if all items of `found` are None, in all processes.

        If an item describes a difference in any process, give up. Otherwise an item is `_UNKNOWN`:
        the next run compares again.
        """
        agree = self._agree or bool
        wrong = next((d for d in found if d not in (None, _UNKNOWN)), None)
        if not agree(wrong is None):
            self._give_up(wrong or "it differed in another process")
        elif agree(_UNKNOWN not in found):
            self._graphs[key].checked = True
            self._say(f"replays batches of {count} as a CUDA graph, equal to an eager run")

    def _give_up(self, reason: str) -> None:
        self._graphs.clear()
        self._left = 0
        self._say(f"runs eagerly, without a CUDA graph: {reason}")

    def _take_over(self, key: Any) -> None:
        """Copy gradients of an eager run into the tensors to which later graphs will add."""
        if (graph := self._graphs.get(key)) is None:
            return
        for own, parameter in zip(graph.gradients, self._parameters, strict=True):
            if own is not None and parameter.grad is not None and own is not parameter.grad:
                own.copy_(parameter.grad)
                parameter.grad = own

    def _stream(self, captures: bool = False) -> AbstractContextManager[Any]:
        """Return the context of an eager run: the capture stream or the caller's stream.

        In inference, only runs with `captures` use the capture stream. In training, all runs do,
        because autograd accumulates gradients on the stream where their nodes were created.
        """
        aside = self._trains or captures
        return self._capturer.warming_up() if aside else contextlib.nullcontext()

    def _gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self._parameters]

    def _set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient


def _difference(
    what: str,
    replayed: Sequence[Tensor],
    again: Sequence[Tensor],
    eager: Sequence[Tensor],
    start: Sequence[Tensor] = (),
) -> str | None:
    """Describe how a replay differs from an eager run; return None if the difference is tolerable.

    `again` and `eager` come from two eager runs. `start` are the gradients to which each run added.
    """
    if not eager and not replayed:
        return None
    if len(replayed) != len(eager):
        return f"{what}: {len(replayed)} tensors in place of {len(eager)}"
    error, noise = _distance(replayed, eager), _distance(again, eager)
    size = _distance(eager, start or [torch.zeros_like(t) for t in eager])
    if not torch.tensor([noise, size]).isfinite().all():
        return _UNKNOWN
    if error <= 4 * noise + _CLOSE * size:
        return None
    return f"{what} are off by {error:.3g} of {size:.3g}, two eager runs by {noise:.3g}"


def _distance(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    parts = torch._foreach_norm(torch._foreach_sub(list(some), list(others)))
    return torch.stack([part.double() for part in parts]).norm().item()


def _same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _is_constant(criterion: object) -> bool:
    """Return whether `criterion` is a function that holds only numbers, strings and None."""
    values: list[object] = []
    while isinstance(criterion, functools.partial):
        values += [*criterion.args, *criterion.keywords.values()]
        criterion = criterion.func
    if not isinstance(criterion, FunctionType) or criterion.__closure__:
        return False
    values += criterion.__defaults__ or ()
    values += (criterion.__kwdefaults__ or {}).values()
    return all(isinstance(value, int | float | str | None) for value in values)


def _surroundings() -> tuple[Any, ...]:
    """Return settings outside the model, such as autocast, that decide which operations run."""
    return (
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        running_stats_frozen(),
        _flags(torch.backends),
    )
