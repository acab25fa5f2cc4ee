"""CUDA graphs: one launch in place of a thousand, for a micro-batch or an inference.

The first runs of a shape are eager. Then one is captured, which computes nothing. The next run is
both a replay and eager, and the results are compared. Only a graph with the results of the eager
run is replayed from then on. Optimizer, schedule, EMA and scaler stay outside the graph. If a
capture fails or differs, the step continues eagerly, and one line says so.
"""

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from tresnet.errors import ConfigError
from tresnet.settings import Compute
from tresnet.steps.compiled import CUDA_GRAPH_MODES

WARMUP_RUNS = 3
WARMUP_RUNS_DDP = 11  # DistributedDataParallel lays its buckets out again after the first runs
CHECKED_AFTER = 2  # runs after the warm-up: one is captured, one is compared
_MOST_GRAPHS = 8
# Allowed difference of a replay from an eager run: four times the difference of two eager runs,
# plus this fraction of the eager value. Norms are compared: single gradients differ between runs.
_CLOSE = 1e-3

Criterion = Callable[[Tensor, Tensor], Tensor]
MicroBatch = Callable[[Tensor, Tensor, Criterion, int, bool], tuple[Tensor, Tensor]]
Say = Callable[[str], object]


class Capturer(Protocol):
    """Captures and replays: `CudaCapturer`, or a stand-in on a machine without a GPU."""

    def warming_up(self) -> AbstractContextManager[Any]:
        """Return the context of the eager runs before a capture."""
        ...

    def in_turn(self) -> AbstractContextManager[Any]:
        """Return the context of a call that may replay, in order with calls on other streams."""
        ...

    def capture(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Return the results of the captured `function`, and a function that replays it."""
        ...

    def same_random_numbers(self) -> AbstractContextManager[Any]:
        """Return a context after which the same random numbers are drawn again."""
        ...


class CudaCapturer:
    """Captures on its own stream; all graphs use one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._used = torch.cuda.Event()

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """Run on the stream of later captures, in order with the current stream."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Run on the current stream, after the last use of a graph."""
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_event(self._used)
        yield
        self._used.record(current)

    def capture(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Record the launches of `function`, without running them.

        If ending a capture fails, PyTorch leaves the current stream, the generator and the
        allocator as in a capture. They are restored here.
        """
        graph, device = torch.cuda.CUDAGraph(), self._stream.device
        generator = torch.cuda.default_generators[device.index]
        before = generator.clone_state()
        # The thread that pins the loader's batches calls CUDA during the capture.
        mode = "thread_local"
        try:
            with (
                torch.cuda.stream(torch.cuda.current_stream(device)),
                torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode=mode
                ),
            ):
                found = function()
        except Exception:
            generator.graphsafe_set_state(before)
            with contextlib.suppress(RuntimeError):  # the allocation has ended
                torch._C._cuda_endAllocateToPool(device.index, self._pool)
            raise
        return found, graph.replay

    def same_random_numbers(self) -> AbstractContextManager[Any]:
        """Restore the generators of the CPU and of this GPU after the context."""
        return torch.random.fork_rng([self._stream.device])


def uses_graph(compute: Compute, device: torch.device, captures: bool = True) -> bool:
    """Return whether a step on `device` tries CUDA graphs.

    'auto' does for an eager model on a GPU, if the rest of the step `captures`. 'on' raises
    `ConfigError` without a GPU, or with a compiler mode that makes graphs itself.
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


class _Reading:
    """State of a model and its surroundings that a captured run has read.

    A replay reads the same addresses, so `holds` is checked before each one. It runs while the GPU
    still computes, in two loops over all modules. `parameters` holds each parameter once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [model]
        for module in self._modules:  # the list grows in the loop
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
        modes = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        return [*modes, *map(Tensor.data_ptr, self._tensors), *map(_trains, self.parameters)]

    def holds(self) -> bool:
        """Return whether the model still has the state that was read."""
        now = self._read_kinds_and_members()
        if not _same(now, self._kinds_and_members):
            return False
        try:
            unchanged = [*map(_attributes, self._modules)] == self._copies
        except (RuntimeError, ValueError):  # tensors or arrays compare by element
            return False
        return unchanged and self._read_values() == self._values

    def is_hooked(self) -> bool:
        """Return whether a replay would skip Python functions of hooks."""
        of_modules = chain.from_iterable(map(_hooks, map(_attributes, self._modules)))
        of_tensors = chain.from_iterable(map(_tensor_hooks, self.parameters))
        return bool(torch_module._has_any_global_hook()) or any(of_modules) or any(of_tensors)


@dataclass
class _Graph:
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    gradients: list[Tensor | None]
    replay: Callable[[], None]
    checked: bool = False  # a replay had the results of an eager run

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        self.replay()
        return [output.clone() for output in self.outputs]


class _Graphs:
    """Graphs of one model, by form of the batch; `replayed` says whether the last run was one."""

    _agree: Callable[[bool], bool] | None = None

    def __init__(self, model: nn.Module, capturer: Capturer, say: Say | None) -> None:
        self.replayed = False
        self._model, self._capturer = model, capturer
        self._say = logging.getLogger(__name__).info if say is None else say
        self._reading = _Reading(model)
        self._graphs: dict[Any, _Graph] = {}
        self._left = _MOST_GRAPHS  # captures left: limits memory, and a model that always changes

    def _is_hooked(self) -> bool:
        """Drop all graphs if the model has changed; return whether it has hooks."""
        if not self._reading.holds():
            self._reading = _Reading(self._model)
            self._graphs.clear()
        return self._reading.is_hooked()

    def _gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self._reading.parameters]

    def _capture(
        self, key: Any, run: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]
    ) -> None:
        self._left -= 1
        try:
            own = [x.clone() for x in inputs]
            outputs, replay = self._capturer.capture(lambda: run(*own))
        except Exception as error:
            if self._agree is not None:
                raise
            self._give_up(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            return
        self._graphs[key] = _Graph(own, outputs, self._gradients(), replay)

    def _accept(self, key: Any, count: int) -> None:
        self._graphs[key].checked = True
        self._say(f"replays batches of {count} as a CUDA graph, equal to an eager run")

    def _give_up(self, reason: str) -> None:
        self._graphs.clear()
        self._left = 0
        self._say(f"runs eagerly, without a CUDA graph: {reason}")


class GraphedForward(_Graphs):
    """A model's forward in inference, eagerly at first and by a CUDA graph for frequent shapes.

    A graph has its own input, and its output is copied. One thread at a time uses the model.
    """

    def __init__(
        self,
        run: Callable[[Tensor], Tensor],
        model: nn.Module,
        capturer: Capturer,
        say: Say | None = None,
    ) -> None:
        """Store the arguments: `run` maps images to logits, `say` gets a line for each decision."""
        super().__init__(model, capturer, say)
        self._run = run
        self._lock = threading.Lock()
        self._seen: Counter[Any] = Counter()

    def __call__(self, images: Tensor) -> Tensor:
        """Return the logits of images."""
        with self._lock, self._capturer.in_turn():
            self.replayed = False
            if self._is_hooked():
                return self._run(images)
            key = _layout(images)
            graph = self._graphs.get(key)
            if graph is None:
                self._seen[key] += 1
                if self._seen[key] < WARMUP_RUNS or not self._left:
                    return self._run(images)
                self._seen[key] = 0
                with self._capturer.warming_up():
                    logits = self._run(images)
                self._capture(key, lambda own: [self._run(own)], [images])
                return logits
            if graph.checked:
                self.replayed = True
                return graph.run([images])[0]
            try:
                runs = [graph.run([images])[0], self._run(images), self._run(images)]
            except torch.OutOfMemoryError:
                runs = []
            if not runs:  # outside the handler, whose traceback would keep the graph
                del graph
                self._give_up(_NO_ROOM)
                return self._run(images)
            replayed, eager, again = runs
            difference = _difference("logits", [replayed], [eager], [again])
            if difference is None:
                self._accept(key, len(images))
            elif difference != _UNKNOWN:
                self._give_up(difference)
            return eager


class _After(NamedTuple):
    """Results of a micro-batch: outputs, buffers and gradients."""

    outputs: Sequence[Tensor]
    buffers: list[Tensor]
    gradients: list[Tensor]


class GraphedMicroBatches(_Graphs):
    """Runs micro-batches: eagerly at first and for rare shapes, else by a CUDA graph.

    A graph has its own inputs, into which each batch is copied, and its own gradients. The first
    micro-batch of an optimizer step sets the gradients, later ones add to them: two graphs.
    """

    def __init__(
        self,
        run: MicroBatch,
        model: nn.Module,
        capturer: Capturer,
        *,
        warmup_runs: int = WARMUP_RUNS,
        agree: Callable[[bool], bool] | None = None,
        say: Say | None = None,
    ) -> None:
        """Store the arguments.

        `run` is an eager micro-batch with the arguments and results of a call, and `model` the bare
        model. A shape is captured after `warmup_runs` in a row. `agree` returns whether something
        holds in every process, and is None for one process. With several a failed capture is an
        error, as the others wait for its reductions. `say` gets a line for each decision.
        """
        super().__init__(model, capturer, say)
        self._run = run
        self._warmup_runs = warmup_runs
        self._agree = agree
        self._recent: Any = None
        self._in_a_row = 0

    def __call__(
        self,
        images: Tensor,
        targets: Tensor,
        criterion: Criterion,
        micro_batches: int,
        is_last: bool,
    ) -> tuple[Tensor, Tensor]:
        """Run one micro-batch, which adds to the gradients as `TrainingStep.backward` does."""

        def run(images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            return self._run(images, targets, criterion, micro_batches, is_last)

        hooked, held = self._is_hooked(), self._gradients()
        shape = _layout(images), _layout(targets), criterion, micro_batches
        is_first = all(gradient is None for gradient in held)
        key = shape, is_first, is_last
        self.replayed = False
        graph = None if hooked else self._graphs.get(key)
        if graph is None:
            self._in_a_row = self._in_a_row + 1 if shape == self._recent else 1
            self._recent = shape
            ready = self._in_a_row > self._warmup_runs and self._left > 0 and not hooked
            with self._capturer.warming_up():
                found = run(images, targets)
            # A graph of a later micro-batch adds to the gradients of a graph's first one.
            if ready and (is_first or self._are_a_graphs(held)):
                gradients = self._gradients()
                self._set_gradients(held)
                self._capture(key, run, [images, targets])
                self._set_gradients(gradients)
                self._take_over(key)
            return found
        if not is_first and not _same(held, graph.gradients):
            return run(images, targets)
        if not graph.checked:
            del graph
            return self._compare(key, run, [images, targets], held)
        self.replayed = True
        loss, logits = graph.run([images, targets])
        self._set_gradients(graph.gradients)
        return loss, logits

    def _compare(
        self,
        key: Any,
        run: Callable[..., tuple[Tensor, Tensor]],
        inputs: Sequence[Tensor],
        held: list[Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        """Replay a graph on a new batch, then run it eagerly twice; return the last result."""
        buffers, sums = list(self._model.buffers()), [g for g in held if g is not None]
        start = [[t.clone() for t in tensors] for tensors in (buffers, sums)]

        def after(function: Callable[[], Sequence[Tensor]]) -> _After:
            for tensors, kept in zip((buffers, sums), start, strict=True):
                if tensors:
                    torch._foreach_copy_(tensors, kept)
            self._set_gradients(held)
            outputs = function()
            gradients = [g.clone() for g in self._gradients() if g is not None]
            return _After(outputs, [b.to(torch.float64, copy=True) for b in buffers], gradients)

        def replay() -> list[Tensor]:
            graph = self._graphs[key]
            outputs = graph.run(inputs)
            self._set_gradients(graph.gradients)
            return outputs

        runs = []
        with self._capturer.warming_up():
            try:
                for function in (replay, lambda: run(*inputs)):
                    with self._capturer.same_random_numbers():
                        runs.append(after(function))
            except torch.OutOfMemoryError:
                if self._agree is not None:
                    raise
                runs.clear()
                self._give_up(_NO_ROOM)
            eager = after(lambda: run(*inputs))
        if runs:
            replayed, again = runs
            self._judge(key, replayed, again, eager, start[1])
        self._take_over(key)
        loss, logits = eager.outputs
        return loss, logits

    def _judge(
        self, key: Any, replayed: _After, again: _After, eager: _After, start: Sequence[Tensor]
    ) -> None:
        agree = self._agree or bool
        found = [
            _difference("loss and logits", replayed.outputs, eager.outputs, again.outputs),
            _difference("buffers", replayed.buffers, eager.buffers, again.buffers),
            _difference(
                "gradients", replayed.gradients, eager.gradients, again.gradients, start=start
            ),
        ]
        wrong = next((d for d in found if d not in (None, _UNKNOWN)), None)
        if not agree(wrong is None):
            self._give_up(wrong or "it differed in another process")
        elif agree(_UNKNOWN not in found):
            self._accept(key, len(eager.outputs[1]))

    def _take_over(self, key: Any) -> None:
        """Copy gradients of an eager run to the tensors to which graphs of later ones add."""
        if (graph := self._graphs.get(key)) is None:
            return
        for own, parameter in zip(graph.gradients, self._reading.parameters, strict=True):
            if own is not None and parameter.grad is not None and own is not parameter.grad:
                own.copy_(parameter.grad)
                parameter.grad = own

    def _set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self._reading.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _are_a_graphs(self, held: list[Tensor | None]) -> bool:
        return any(_same(held, graph.gradients) for graph in self._graphs.values())


_UNKNOWN = "no finite numbers to compare"  # as in fp16, until the scale fits
_NO_ROOM = "no memory for a graph beside an eager run"


def _difference(
    what: str,
    replayed: Sequence[Tensor],
    eager: Sequence[Tensor],
    again: Sequence[Tensor],
    start: Sequence[Tensor] = (),
) -> str | None:
    """Return the difference of a replay in words, or None if it is within the tolerance.

    `start` are the gradients to which a later micro-batch was added.
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


def _layout(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), x.dtype
