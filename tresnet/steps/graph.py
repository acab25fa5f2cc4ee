"""CUDA graphs of a training micro-batch or an inference: one launch instead of a thousand.

The first batches of a shape run eagerly. The next batch also runs eagerly. Then its operations are
captured, but not executed. The batch after it is replayed and run eagerly, to compare the results.
If the results agree, later batches are replayed. If not, or if the capture fails, later batches run
eagerly, and a message says why. Optimizer, schedule, EMA and scaler stay outside the graph.
"""

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from tresnet.errors import ConfigError
from tresnet.layers.norm import running_stats_frozen
from tresnet.settings import CUDA_GRAPH_MODES, Compute
from tresnet.steps.capturer import CudaCapturer
from tresnet.steps.compiled import Say, log
from tresnet.steps.module_state import ModuleState, is_constant, needs_grad

WARMUP_RUNS = 3  # the number in the example of PyTorch's notes on CUDA graphs
WARMUP_RUNS_DDP = 11  # DistributedDataParallel rebuilds gradient buckets after the first runs
CHECKED_AFTER = 2  # number of runs after the warm-up: one is captured, the next is compared
# Limit of captures. 8 is a guess: gradient accumulation with two image shapes needs 6 graphs.
_MOST_GRAPHS = 8
# A replay may differ from an eager run by four times the difference of two eager runs, plus this
# fraction of the eager result. All tensors are compared as one: single tensors vary too much.
_CLOSE = 1e-3
EXPLAINED_AFTER = 50  # eager runs in a row, after which a message says why
_UNKNOWN = "no finite numbers to compare"  # in fp16, until the scaler has lowered its scale

Run = Callable[..., Sequence[Tensor]]
Gradients = Sequence[Tensor | None]


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


# Global flags by which PyTorch chooses kernels.
_flags = attrgetter(
    "cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic", "cudnn.conv.fp32_precision",
    "cuda.matmul.fp32_precision", "cuda.matmul.allow_fp16_accumulation",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
)  # fmt: skip


_PARTS = "the shape", "the criterion", "the number of micro-batches", "a setting of PyTorch"


class Action(Enum):
    """Treatment of a batch by `Graphs`. The last three run it eagerly, and their values say why."""

    REPLAY = "replay the graph"
    COMPARE = "compare a replay with two eager runs"
    CAPTURE = "run the batch eagerly, then capture a graph"
    HOOKED = "the model has hooks, or the images need a gradient"
    RARE = "{} changed from batch to batch"
    FOREIGN = "the gradients of earlier micro-batches were replaced"


def decide(
    graph_checked: bool | None, *, is_hooked: bool, is_frequent: bool, adds_up: bool
) -> Action:
    """Choose what to do with a batch.

    Args:
        graph_checked: Whether the batch's graph has agreed with an eager run. None: no graph.
        is_hooked: Whether the model has hooks, or an input needs a gradient; a replay skips both.
        is_frequent: Whether the batch's shape has run often enough for a capture.
        adds_up: Whether the run starts the gradients, or adds to tensors that a graph knows.
    """
    if is_hooked:
        return Action.HOOKED
    if graph_checked is None and not is_frequent:
        return Action.RARE
    if not adds_up:
        return Action.FOREIGN
    return {None: Action.CAPTURE, False: Action.COMPARE, True: Action.REPLAY}[graph_checked]


@dataclass(frozen=True)
class _Batch:
    function: Run
    inputs: Sequence[Tensor]
    criterion: object
    gradients: Gradients  # to which `function` adds
    shape: Any  # what the graph depends on, apart from values of modules
    is_last: bool

    @property
    def is_first(self) -> bool:
        return all(gradient is None for gradient in self.gradients)

    @property
    def key(self) -> Any:
        return self.shape, self.is_first, self.is_last

    def run(self) -> Sequence[Tensor]:
        return self.function(*self.inputs)


@dataclass
class _Graph:
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    gradients: Gradients
    replay: Callable[[], None]
    criterion: ModuleState
    checked: bool = False  # whether a replay has agreed with an eager run


class Graphs:
    """Runs one model: eagerly at first and for rare shapes, otherwise by replaying CUDA graphs.

    Each batch is copied into the inputs of a graph, and the graph's outputs are copied out.
    Training has two kinds of graphs. That of the first micro-batch of an optimizer step overwrites
    the gradients, and that of later micro-batches adds to them. `replayed` says whether the last
    run was a replay.
    """

    def __init__(
        self,
        model: nn.Module,
        capturer: CudaCapturer,
        *,
        trains: bool,
        warmup_runs: int = WARMUP_RUNS,
        agree: Callable[[bool], bool] | None = None,
        say: Say = log,
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
        self._say = say
        self._lock = threading.Lock()
        self._graphs: dict[Any, _Graph] = {}
        self._seen: Counter[Any] = Counter()
        self._left = _MOST_GRAPHS  # captures that are still allowed; the limit saves memory
        self._last_shape: Any = ()
        self._changed = ""  # why `_seen` began anew
        self._eager_runs = 0  # in a row
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
        with self._lock, self._capturer.serialized():
            if not self._state.holds() and (self._left or self._graphs):
                self._read()
            shape = self._count(inputs, criterion, micro_batches)
            batch = _Batch(run, inputs, criterion, self._gradients(), shape, is_last)
            action = self._action(batch)
            self._explain(action)
            self.replayed = action is Action.REPLAY
            methods = {
                Action.REPLAY: self._replay,
                Action.COMPARE: self._compare,
                Action.CAPTURE: self._capture,
            }
            return methods.get(action, self._run)(batch)

    def _read(self) -> None:
        """Read the state of the model, and drop all graphs that were captured before."""
        self._state = ModuleState(self._model)
        self._parameters = self._state.parameters if self._trains else []
        self._graphs.clear()
        self._seen.clear()
        self._changed = "a value of the model or the criterion"

    def _count(self, inputs: Sequence[Tensor], criterion: object, micro_batches: int) -> Any:
        """Count the batches of a shape; return the shape, with all else that selects a graph."""
        layouts = tuple((x.shape, x.stride(), x.dtype) for x in inputs)
        shape = layouts, _contents(criterion), micro_batches, _surroundings()
        parts = zip(_PARTS, shape, self._last_shape, strict=False)
        self._changed = next((name for name, new, old in parts if new != old), self._changed)
        self._last_shape, self._last_criterion = shape, criterion  # so that no other gets its id
        if self._trains and shape not in self._seen:
            self._seen.clear()  # so that an epoch's smaller last batch never gets a graph
        self._seen[shape] += 1
        return shape

    def _action(self, batch: _Batch) -> Action:
        graph = self._graphs.get(batch.key)
        if graph is not None and (graph.criterion.is_hooked() or not graph.criterion.holds()):
            self._read()
            graph = None
        graphs = self._graphs.values() if graph is None else [graph]
        return decide(
            None if graph is None else graph.checked,
            is_hooked=self._state.is_hooked() or any(map(needs_grad, batch.inputs)),
            is_frequent=self._seen[batch.shape] > self._warmup_runs and self._left > 0,
            adds_up=batch.is_first or any(_same(batch.gradients, g.gradients) for g in graphs),
        )

    def _explain(self, action: Action) -> None:
        self._eager_runs += 1
        if action in (Action.REPLAY, Action.COMPARE, Action.CAPTURE):
            self._eager_runs = 0
        elif self._eager_runs == EXPLAINED_AFTER and self._left:
            reason = action.value.format(self._changed)
            self._say(f"has run {EXPLAINED_AFTER} batches eagerly, without a CUDA graph: {reason}")

    def _run(self, batch: _Batch) -> Sequence[Tensor]:
        with self._stream():
            return batch.run()

    def _replay(self, batch: _Batch) -> Sequence[Tensor]:
        graph = self._graphs[batch.key]
        for own, new in zip(graph.inputs, batch.inputs, strict=True):
            own.copy_(new, non_blocking=True)
        graph.replay()
        self._set_gradients(graph.gradients)
        return [output.clone() for output in graph.outputs]  # the next replay overwrites them

    def _capture(self, batch: _Batch) -> Sequence[Tensor]:
        """Run the batch eagerly for its results; then capture it, which computes nothing."""
        with self._stream(captures=True):
            outputs = batch.run()
        gradients = self._gradients()
        self._set_gradients(batch.gradients)
        self._add_graph(batch)
        self._set_gradients(gradients)
        self._take_over(batch.key)
        return outputs

    def _add_graph(self, batch: _Batch) -> None:
        criterion = ModuleState(batch.criterion)
        if refusal := _refusal(self._state, criterion, batch.inputs[0].device):
            self._give_up(refusal)
            return
        self._left -= 1
        try:
            own = [x.clone() for x in batch.inputs]  # each replay reads these addresses
            outputs, replay = self._capturer.capture(lambda: batch.function(*own))
        except Exception as error:
            if self._agree is not None:
                raise
            self._give_up(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            return
        self._graphs[batch.key] = _Graph(own, outputs, self._gradients(), replay, criterion)
        if not self._left:
            self._say(
                f"has captured {_MOST_GRAPHS} CUDA graphs, as many as it may: other shapes and "
                "settings run eagerly from now on"
            )

    def _compare(self, batch: _Batch) -> Sequence[Tensor]:
        """Compare a replay with two eager runs; return the results of the second eager run."""
        buffers = list(self._model.buffers()) if self._trains else []
        sums = [gradient for gradient in batch.gradients if gradient is not None]
        start = [[t.clone() for t in tensors] for tensors in (buffers, sums)]

        def results(function: Callable[[], Sequence[Tensor]]) -> list[Sequence[Tensor]]:
            for tensors, values in zip((buffers, sums), start, strict=True):
                if tensors:
                    torch._foreach_copy_(tensors, values)
            self._set_gradients(batch.gradients)
            outputs = function()
            gradients = [g.clone() for g in self._gradients() if g is not None]
            return [outputs, [b.to(torch.float64, copy=True) for b in buffers], gradients]

        runs = []
        with self._stream():
            try:
                for function in (lambda: self._replay(batch), batch.run):
                    with self._capturer.same_random_numbers():
                        runs.append(results(function))
            except torch.OutOfMemoryError:
                if self._agree is not None:
                    raise
                runs.clear()
                self._give_up("no memory for a graph beside an eager run")
            eager = results(batch.run)
        if runs:
            names = "outputs", "buffers", "gradients"
            rows = zip(names, *runs, eager, ((), (), start[1]), strict=True)
            self._judge(batch, [_difference(*row) for row in rows])
        self._take_over(batch.key)
        return eager[0]

    def _judge(self, batch: _Batch, differences: list[str | None]) -> None:
        """Accept the graph if all items of `differences` are None, in all processes.

        If an item describes a difference in any process, give up. Otherwise an item is `_UNKNOWN`:
        the next run compares again.
        """
        agree = self._agree or bool
        wrong = next((d for d in differences if d not in (None, _UNKNOWN)), None)
        if not agree(wrong is None):
            self._give_up(wrong or "it differed in another process")
        elif agree(_UNKNOWN not in differences):
            self._graphs[batch.key].checked = True
            count = len(batch.inputs[0])
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
        return self._capturer.on_capture_stream() if aside else contextlib.nullcontext()

    def _gradients(self) -> Gradients:
        return [parameter.grad for parameter in self._parameters]

    def _set_gradients(self, gradients: Gradients) -> None:
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


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _contents(criterion: object) -> Any:
    """Return a key that is equal for the same object, and for partials with the same contents."""
    if isinstance(criterion, functools.partial):
        keywords = ((name, _contents(x)) for name, x in sorted(criterion.keywords.items()))
        return *map(_contents, (criterion.func, *criterion.args)), *keywords
    return (type(criterion), repr(criterion)) if is_constant(criterion) else id(criterion)


def _refusal(model: ModuleState, criterion: ModuleState, device: torch.device) -> str | None:
    if unreadable := model.unreadable or criterion.unreadable:
        return (
            f"it could not notice a change of {unreadable}: expected numbers, strings, tensors, "
            "modules, functions of torch, and containers or partials of these"
        )
    tensors = [*model.tensors, *criterion.tensors]
    elsewhere = [
        f"{name} on {tensor.device}" for name, tensor in tensors if tensor.device != device
    ]
    if elsewhere:
        return f"expected all tensors on {device}, got {elsewhere[0]}: make it a buffer"
    if criterion.is_hooked() or any(needs_grad(tensor) for _, tensor in criterion.tensors):
        return "expected a criterion without hooks and trained parameters"
    return None


def _surroundings() -> tuple[Any, ...]:
    """Return settings outside the model, such as autocast, that decide which operations run."""
    return (
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        running_stats_frozen(),
        _flags(torch.backends),
    )
