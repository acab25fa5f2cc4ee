"""CUDA graphs of training micro-batches and of inference: a replay is one launch.

The first batches of a shape run eagerly. The next batch runs eagerly twice, a graph captures its
operations, and a replay is compared with the eager runs. If the results agree, later batches are
replayed. Otherwise, or if the capture fails, later batches run eagerly, and a message says why. The
optimizer step, which updates EMA, schedule and scaler, has no graph. Neither have collectives: each
process decides alone, and averages its gradients after the last micro-batch.
"""

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from tresnet.errors import ConfigError
from tresnet.layers.norm import running_stats_frozen
from tresnet.settings import Compute
from tresnet.steps.capturer import CudaCapturer
from tresnet.steps.compiled import CUDA_GRAPH_MODES, Say, log
from tresnet.steps.module_state import ModuleState, needs_grad

WARMUP_RUNS = 3  # as in the example of PyTorch's notes on CUDA graphs; the next run is captured
# Guessed. With gradient accumulation, the first micro-batch and the others need a capture each.
_MAX_CAPTURES = 8
# A replay may differ from an eager run by four times the difference of two eager runs, plus this
# fraction of the eager result. Norms over all tensors are compared: single tensors vary too much.
_RELATIVE_TOLERANCE = 1e-3
EXPLAINED_AFTER = 50  # number of consecutive eager runs after which a message says why

Run = Callable[..., Sequence[Tensor]]
Gradients = Sequence[Tensor | None]
Norms = dict[str, float]
Results = dict[str, Sequence[Tensor]]  # outputs, buffers and gradients


def uses_graph(compute: Compute, device: torch.device, suitable: bool = True) -> bool:
    """Return whether a step on `device` tries to capture CUDA graphs.

    `compute.cuda_graph` 'auto' chooses graphs for eager models on a GPU if the step is `suitable`.
    'on' raises `ConfigError` without a GPU, or if `torch.compile` makes CUDA graphs itself.
    """
    if compute.cuda_graph == "auto":
        return suitable and device.type == "cuda" and compute.compile == "none"
    if compute.cuda_graph == "on" and device.type != "cuda":
        raise ConfigError(f"--cuda-graph on: expected a GPU, got device {device}: choose auto")
    if compute.cuda_graph == "on" and compute.compile in CUDA_GRAPH_MODES:
        raise ConfigError(
            f"--cuda-graph on: --compile {compute.compile} makes graphs of its own: choose one of "
            "the two options, or --compile default"
        )
    return compute.cuda_graph == "on"


# Global flags by which PyTorch chooses kernels.
_flags = attrgetter(
    "cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic", "cudnn.conv.fp32_precision",
    "cuda.matmul.fp32_precision", "cuda.matmul.allow_fp16_accumulation",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
)  # fmt: skip


_SIGNATURE = "the shape", "the criterion", "the number of micro-batches", "a setting of PyTorch"


@dataclass(frozen=True)
class _Batch:
    function: Run
    inputs: Sequence[Tensor]
    criterion: object
    gradients: Gradients  # before the run; `function` adds to these tensors
    signature: Any  # all that a graph depends on, except values of the model

    @property
    def is_first(self) -> bool:
        return all(gradient is None for gradient in self.gradients)

    @property
    def key(self) -> Any:
        return self.signature, self.is_first

    def run(self) -> Sequence[Tensor]:
        return self.function(*self.inputs)


@dataclass
class _Graph:
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    gradients: Gradients
    replay: Callable[[], None]
    criterion: object  # stored, so that no other criterion can get its id


class Graphs:
    """CUDA graphs of one model; a batch for which there is no graph runs eagerly.

    A replay copies the batch into the graph's input tensors, and returns copies of the graph's
    outputs. In training, the graph of an optimizer step's first micro-batch overwrites gradients;
    graphs of later micro-batches add to them. The attribute `replayed` says whether the last run
    was a replay, and `setting_up` whether the run captured or compared a graph.
    """

    def __init__(
        self,
        model: nn.Module,
        capturer: CudaCapturer,
        *,
        trains: bool,
        say: Say = log,
        warn: Say | None = None,
    ) -> None:
        """Store the arguments; `model` must not be wrapped in DistributedDataParallel.

        With `trains`, another shape among the warm-up runs of a shape starts their count again.
        `say` gets a message about each decision, `warn` those that tell why batches run eagerly;
        by default, `say` gets these too.
        """
        self.replayed = self.setting_up = False
        self._model, self._capturer, self._trains = model, capturer, trains
        self._say, self._warn = say, warn or say
        self._lock = threading.Lock()
        self._graphs: dict[Any, _Graph] = {}
        self._run_counts: Counter[Any] = Counter()  # by signature
        self._captures_left = _MAX_CAPTURES  # limited, because each graph holds memory
        self._last_signature: Any = ()
        self._changed = ""  # the last change that cleared `_run_counts`, for a message
        self._eager_runs = 0  # number of consecutive eager runs
        self._read_model()

    def __call__(
        self,
        run: Run,
        inputs: Sequence[Tensor],
        criterion: object = None,
        micro_batches: int = 1,
    ) -> Sequence[Tensor]:
        """Return the results of `run(*inputs)`; in training, `run` adds to the gradients.

        Every combination of input layouts, `criterion` and `micro_batches` has its own graphs.
        `TrainingStep.backward` explains the last two arguments.
        """
        with self._lock, self._capturer.serialized():
            if not self._state.is_unchanged() and (self._captures_left or self._graphs):
                self._read_model()
            state = ModuleState(criterion)
            self._last_criterion = criterion  # while stored here, no other can get its id
            signature = self._count(inputs, (id(criterion), repr(state.facts)), micro_batches)
            batch = _Batch(run, inputs, criterion, self._gradients(), signature)
            reason = self._reason_to_run_eagerly(batch, state)
            has_graph = batch.key in self._graphs
            self.replayed = reason is None and has_graph
            self.setting_up = reason is None and not has_graph
            if reason is not None:
                return self._run(batch, reason)
            self._eager_runs = 0
            return self._replay(batch) if has_graph else self._capture(batch)

    def _read_model(self) -> None:
        """Read the `ModuleState` of the model, and drop all captured graphs."""
        self._state = ModuleState(self._model)
        self._parameters = self._state.parameters if self._trains else []
        self._graphs.clear()
        self._run_counts.clear()
        self._changed = "a value of the model"

    def _count(self, inputs: Sequence[Tensor], criterion: Any, micro_batches: int) -> Any:
        """Return the signature of a batch, and count the run for this signature."""
        layouts = tuple((x.shape, x.stride(), x.dtype) for x in inputs)
        signature = layouts, criterion, micro_batches, _global_settings()
        parts = zip(_SIGNATURE, signature, self._last_signature, strict=False)
        self._changed = next((name for name, new, old in parts if new != old), self._changed)
        self._last_signature = signature
        if self._trains and signature not in self._run_counts:
            self._run_counts.clear()  # so that an epoch's smaller last batch never gets a graph
        self._run_counts[signature] += 1
        return signature

    def _reason_to_run_eagerly(self, batch: _Batch, criterion: ModuleState) -> str | None:
        """Return why a batch is neither replayed nor captured, or None."""
        tensors = *batch.inputs, *criterion.parameters
        if self._state.is_hooked() or criterion.is_hooked() or any(map(needs_grad, tensors)):
            return "model or criterion has hooks, or images or criterion need a gradient"
        graph = self._graphs.get(batch.key)
        is_frequent = self._captures_left > 0 and self._run_counts[batch.signature] > WARMUP_RUNS
        if graph is None and not is_frequent:
            return f"{self._changed} changed from batch to batch"
        graphs = self._graphs.values() if graph is None else [graph]
        if batch.is_first or any(_same(batch.gradients, g.gradients) for g in graphs):
            return None
        return "the gradients of earlier micro-batches were replaced"

    def _run(self, batch: _Batch, reason: str) -> Sequence[Tensor]:
        self._eager_runs += 1
        if self._eager_runs == EXPLAINED_AFTER and self._captures_left:
            count = EXPLAINED_AFTER
            self._warn(f"{count} batches have run eagerly, without a CUDA graph: {reason}")
        # Autograd accumulates a gradient on the stream on which its node was created, so training
        # needs one stream for all runs.
        on_stream = self._capturer.on_capture_stream if self._trains else contextlib.nullcontext
        with on_stream():
            return batch.run()

    def _replay(self, batch: _Batch) -> Sequence[Tensor]:
        graph = self._graphs[batch.key]
        for own, new in zip(graph.inputs, batch.inputs, strict=True):
            own.copy_(new, non_blocking=True)
        graph.replay()
        self._set_gradients(graph.gradients)
        return [output.clone() for output in graph.outputs]  # a replay overwrites graph.outputs

    def _capture(self, batch: _Batch) -> Sequence[Tensor]:
        """Run a batch twice eagerly, capture a graph, and compare its replay with the eager runs.

        All runs begin with equal buffers, gradients and random numbers. Before the capture, the
        eager runs' memory is free again, except for copies of the second run's results.
        """
        buffers = list(self._model.buffers()) if self._trains else []
        state = [*buffers, *(gradient for gradient in batch.gradients if gradient is not None)]
        start, restore_random = [tensor.clone() for tensor in state], self._capturer.random_state()

        def run(function: Callable[[], Sequence[Tensor]]) -> Results:
            for tensor, value in zip(state, start, strict=True):
                tensor.copy_(value)
            self._set_gradients(batch.gradients)
            restore_random()
            outputs = function()
            gradients = [g for g in self._gradients() if g is not None]
            return {"outputs": outputs, "buffers": buffers, "gradients": gradients}

        with self._capturer.on_capture_stream():
            try:
                first, eager = _copies(run(batch.run)), _copies(run(batch.run))
                restore_random_after = self._capturer.random_state()
                sizes, noises = _norms(eager), _norms(eager, first)
                del first
                # In fp16, gradients are infinite until the scaler has lowered its scale.
                if all(map(math.isfinite, [*sizes.values(), *noises.values()])):
                    self._set_gradients(batch.gradients)
                    self._add_graph(batch)
                if batch.key in self._graphs:
                    results = run(lambda: self._replay(batch))
                    restore_random_after()
                    self._judge(batch, sizes, noises, _norms(results, eager))
                    if batch.key in self._graphs:
                        return results["outputs"]
            except torch.OutOfMemoryError:
                self._give_up("no memory to compare a graph with eager runs")
            return run(batch.run)["outputs"]

    def _add_graph(self, batch: _Batch) -> None:
        self._captures_left -= 1
        try:
            own = [x.clone() for x in batch.inputs]  # each replay reads these addresses
            outputs, replay = self._capturer.capture(lambda: batch.function(*own))
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            return
        self._graphs[batch.key] = _Graph(own, outputs, self._gradients(), replay, batch.criterion)
        if not self._captures_left:
            self._say(
                f"{_MAX_CAPTURES} CUDA graphs were captured, which is the limit: other shapes and "
                "settings run eagerly from now on"
            )

    def _judge(self, batch: _Batch, sizes: Norms, noises: Norms, errors: Norms) -> None:
        """Give up if a replay is further from an eager run than two eager runs from each other.

        `noises` are differences between two eager runs; `errors` are those of the replay.
        """
        for what, error in errors.items():
            if not error <= 4 * noises[what] + _RELATIVE_TOLERANCE * sizes[what]:
                numbers = f"{error:.3g} of {sizes[what]:.3g}, two eager runs by {noises[what]:.3g}"
                self._give_up(f"{what} are off by {numbers}")
                return
        count = len(batch.inputs[0])
        self._say(f"batches of {count} run as a CUDA graph, which agrees with an eager run")

    def _give_up(self, reason: str) -> None:
        self._graphs.clear()
        self._captures_left = 0
        self._warn(f"batches run eagerly, without a CUDA graph: {reason}")

    def _gradients(self) -> Gradients:
        return [parameter.grad for parameter in self._parameters]

    def _set_gradients(self, gradients: Gradients) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient


class GraphedStep:
    """Base of training step and inference step: replays batches of frequent shapes, if asked to."""

    model: nn.Module
    _trains = False
    _graphs: Graphs | None = None

    def capture_with(self, capturer: CudaCapturer, say: Say = log, warn: Say | None = None) -> None:
        """Replay batches of frequent shapes as CUDA graphs from now on; see `Graphs`."""
        self._graphs = Graphs(self.model, capturer, trains=self._trains, say=say, warn=warn)

    @property
    def replayed(self) -> bool:
        """Whether the last batch was run by the replay of a CUDA graph."""
        return self._graphs is not None and self._graphs.replayed

    @property
    def setting_up(self) -> bool:
        """Whether the last batch captured or compared a CUDA graph, which is no part of a rate."""
        return self._graphs is not None and self._graphs.setting_up


def _copies(results: Results) -> Results:
    return {name: [tensor.clone() for tensor in part] for name, part in results.items()}


def _norms(results: Results, others: Results | None = None) -> Norms:
    """Return norms of the outputs, buffers and gradients or, if others are given, differences."""
    norms = {}
    for name, tensors in results.items():
        parts = tensors if others is None else map(torch.sub, tensors, others[name])
        norms[name] = math.hypot(*[part.double().norm().item() for part in parts])
    return norms


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _global_settings() -> tuple[Any, ...]:
    """Return global settings, such as autocast, that decide which operations run."""
    return (
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        running_stats_frozen(),
        _flags(torch.backends),
    )
