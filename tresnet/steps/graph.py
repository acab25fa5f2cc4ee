"""CUDA graphs of training micro-batches and of inference: a replay is one launch.

The first batches of a shape run eagerly, a graph captures the operations of the next batch, and
later batches are replayed. After a capture that fails, batches run eagerly, and a message says why.
The optimizer step, which updates EMA, schedule and scaler, has no graph. Neither have collectives:
each process decides alone, and averages its gradients after the last micro-batch.

A replay runs no Python code. So hooks are read when a graph is captured, and a graph is dropped as
soon as the model has another parameter, buffer or module. After another change, such as of a mode,
of `requires_grad` or of a global setting of PyTorch, call `GraphedStep.drop_graphs`.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from tresnet.errors import ConfigError, InputError
from tresnet.layers.hooks import hooks_of
from tresnet.settings import Compute
from tresnet.steps.capturer import CudaCapturer
from tresnet.steps.compiled import CUDA_GRAPH_MODES, Say, log

WARMUP_RUNS = 3  # as in the example of PyTorch's notes on CUDA graphs; the next run is captured
# Guessed. With gradient accumulation, the first micro-batch and the others need a graph each.
_MAX_GRAPHS = 8

_tensor_hooks = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")

Run = Callable[..., Sequence[Tensor]]
Gradients = Sequence[Tensor | None]


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


class _Contents:
    """Parameters, buffers and modules inside a model, whose addresses a graph contains."""

    def __init__(self, model: nn.Module) -> None:
        owners = [own for m in model.modules() for own in (m._parameters, m._buffers, m._modules)]
        self._owners = [own for own in owners if own]
        self._parts = self._read()
        self._tensors = [part for part in self._parts if isinstance(part, Tensor)]
        self._addresses = [*map(Tensor.data_ptr, self._tensors)]

    def _read(self) -> list[Any]:
        return list(chain.from_iterable([own.values() for own in self._owners]))

    def are_unchanged(self) -> bool:
        """Return whether all parts are the same objects, with their values in the same memory."""
        same = _same(self._read(), self._parts)
        return same and [*map(Tensor.data_ptr, self._tensors)] == self._addresses


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
    was a replay, and `setting_up` whether the run captured a graph, or tried to.
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
        `say` gets a message about each graph, `warn` the one that tells why batches run eagerly;
        by default, `say` gets it too.
        """
        self.replayed = self.setting_up = False
        self._model, self._capturer, self._trains = model, capturer, trains
        self._say, self._warn = say, warn or say
        self._lock = threading.Lock()
        self._graphs: dict[Any, _Graph] = {}
        self._run_counts: Counter[Any] = Counter()
        self._has_failed = False  # a capture; all batches run eagerly from then on
        self.drop()

    def drop(self) -> bool:
        """Drop all graphs, and start to count warm-up runs again; return whether there was one."""
        had_graphs = bool(self._graphs)
        self._graphs.clear()
        self._run_counts.clear()
        self._contents = _Contents(self._model)
        self._parameters = list(self._model.parameters()) if self._trains else []
        return had_graphs

    def __call__(
        self,
        run: Run,
        inputs: Sequence[Tensor],
        criterion: object = None,
        micro_batches: int = 1,
    ) -> Sequence[Tensor]:
        """Return the results of `run(*inputs)`; in training, `run` adds to the gradients.

        Every combination of input layouts, `criterion` and `micro_batches` has its own graphs.
        `TrainingStep.backward` explains the last two arguments. Inputs that need a gradient run
        eagerly.
        """
        with self._lock, self._capturer.serialized():
            if not self._contents.are_unchanged():
                self.drop()
            earlier = self._gradients()
            signature = self._count(inputs, criterion, micro_batches)
            key = signature, tuple(map(id, earlier))
            graph = self._graphs.get(key)
            self.setting_up = graph is None and self._can_capture(signature, inputs, earlier)
            if self.setting_up:
                graph = self._capture(run, inputs, criterion)
                if graph is not None:
                    self._graphs[key] = graph
            self.replayed = graph is not None
            if graph is not None:
                return self._replay(graph, inputs)
            # Autograd accumulates a gradient on the stream on which its node was created, so
            # training needs one stream for all runs.
            with self._capturer.on_capture_stream() if self._trains else contextlib.nullcontext():
                return run(*inputs)

    def _count(self, inputs: Sequence[Tensor], criterion: object, micro_batches: int) -> Any:
        """Return the signature of a batch, and count the run for this signature."""
        layouts = tuple((x.shape, x.stride(), x.dtype, x.requires_grad) for x in inputs)
        signature = layouts, id(criterion), micro_batches
        self._last_criterion = criterion  # while stored here, no other can get its id
        if self._trains and signature not in self._run_counts:
            self._run_counts.clear()  # so that an epoch's smaller last batch never gets a graph
        self._run_counts[signature] += 1
        return signature

    def _can_capture(self, signature: Any, inputs: Sequence[Tensor], earlier: Gradients) -> bool:
        """Return whether to capture a batch; `earlier` are the gradients before it."""
        if self._has_failed or self._run_counts[signature] <= WARMUP_RUNS:
            return False
        if len(self._graphs) == _MAX_GRAPHS or any(x.requires_grad for x in inputs):
            return False
        # A replay adds to the same tensors again, so they must be those that a graph fills.
        is_first = all(gradient is None for gradient in earlier)
        return is_first or any(_same(earlier, g.gradients) for g in self._graphs.values())

    def _capture(self, run: Run, inputs: Sequence[Tensor], criterion: object) -> _Graph | None:
        """Return a graph of `run(*inputs)`, or None if the capture fails."""
        earlier = self._gradients()
        try:
            _check_suitable(self._model, criterion)
            own = [x.clone() for x in inputs]  # each replay reads these addresses
            outputs, replay = self._capturer.capture(lambda: run(*own))
        except Exception as error:
            self._has_failed = True
            self._graphs.clear()
            self._set_gradients(earlier)
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            self._warn(f"batches run eagerly, without a CUDA graph: {reason}")
            return None
        self._say(f"batches of {len(inputs[0])} run as a CUDA graph")
        if len(self._graphs) + 1 == _MAX_GRAPHS:
            self._say(
                f"{_MAX_GRAPHS} CUDA graphs were captured, which is the limit: other shapes and "
                "settings run eagerly from now on"
            )
        return _Graph(own, outputs, self._gradients(), replay, criterion)

    def _replay(self, graph: _Graph, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        for own, new in zip(graph.inputs, inputs, strict=True):
            own.copy_(new, non_blocking=True)
        graph.replay()
        self._set_gradients(graph.gradients)
        return [output.clone() for output in graph.outputs]  # a replay overwrites graph.outputs

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

    def drop_graphs(self) -> bool:
        """Drop all graphs, which are captured anew later; return whether there was one."""
        return self._graphs is not None and self._graphs.drop()

    @property
    def replayed(self) -> bool:
        """Whether the last batch was run by the replay of a CUDA graph."""
        return self._graphs is not None and self._graphs.replayed

    @property
    def setting_up(self) -> bool:
        """Whether the last batch captured a CUDA graph, which is no part of a rate."""
        return self._graphs is not None and self._graphs.setting_up


def _check_suitable(model: nn.Module, criterion: object) -> None:
    """Raise `InputError` if a replay would leave out hooks, or a gradient of the criterion."""
    modules = list(model.modules())
    if isinstance(criterion, nn.Module):
        modules += criterion.modules()
        if any(parameter.requires_grad for parameter in criterion.parameters()):
            raise InputError("the criterion has parameters to train")
    tensors = [p for module in modules for p in module._parameters.values() if p is not None]
    hooks = [*map(_tensor_hooks, tensors), *(hooks_of(vars(module)) for module in modules)]
    if torch_module._has_any_global_hook() or any(map(any, hooks)):
        raise InputError("the model or the criterion has hooks")


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))
