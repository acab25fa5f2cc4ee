"""A forward and backward pass as a CUDA graph: one launch in place of a thousand.

The first passes of a run are real ones, run eagerly on the stream that is captured later: they are
the warm-up that a capture needs (libraries set up, kernels compiled and tuned), so nothing has to
be undone afterwards and the run is the same run. A capture itself computes nothing. The optimizer,
the schedule, the average and the scaler stay outside.
"""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

WARMUP_PASSES = 3
WARMUP_PASSES_DDP = 11  # its buckets are laid out anew after the first passes
_MOST_GRAPHS = 8

Criterion = Callable[[Tensor, Tensor], Tensor]
Pass = Callable[[Tensor, Tensor, Criterion, int, bool], tuple[Tensor, Tensor]]


class Capturer(Protocol):
    """What captures and replays: `CudaCapturer`, or a stand-in on a machine without a GPU."""

    def warming_up(self) -> AbstractContextManager[Any]:
        """Where the eager passes before a capture run."""
        ...

    def capture(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """What `function` returned while it was captured, and a function that replays it."""
        ...


class CudaCapturer:
    """Captures on a stream of its own; all graphs share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        """Make the stream and the pool."""
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def warming_up(self) -> Any:
        """On the stream that is captured later, in order with the current one."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def capture(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Record what `function` launches, without running it."""
        graph = torch.cuda.CUDAGraph()
        # The thread that pins the loader's batches goes on calling CUDA meanwhile.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
            found = function()
        return found, graph.replay


class _Shape(NamedTuple):
    """What must be equal for a graph to fit."""

    images: tuple[Any, ...]
    targets: tuple[Any, ...]
    criterion: Criterion
    passes: int


class _Graph(NamedTuple):
    images: Tensor
    targets: Tensor
    loss: Tensor
    logits: Tensor
    gradients: list[Tensor | None]
    replay: Callable[[], None]


class GraphedPasses:
    """Runs passes: eagerly at first and for shapes that come rarely, by a CUDA graph otherwise.

    A graph has its own inputs, into which each batch is copied, and its own gradients. The first
    pass of an update sets them, the later ones add to them; each is a graph of its own.
    """

    def __init__(
        self,
        run: Pass,
        parameters: Sequence[torch.nn.Parameter],
        capturer: Capturer,
        *,
        warmup_passes: int = WARMUP_PASSES,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        """Nothing is captured yet.

        Args:
            run: An eager pass: images, targets, criterion, passes, is_last to loss and logits.
            parameters: Those that get gradients.
            capturer: Captures and replays.
            warmup_passes: Eager passes of one shape in a row before it is captured.
            say: Told of each capture.
        """
        self._run = run
        self._parameters = [p for p in parameters if p.requires_grad]
        self._capturer = capturer
        self._warmup_passes = warmup_passes
        self._say = say
        self._graphs: dict[tuple[_Shape, bool, bool], _Graph] = {}
        self._recent: _Shape | None = None
        self._in_a_row = 0

    def __call__(
        self, images: Tensor, targets: Tensor, criterion: Criterion, passes: int, is_last: bool
    ) -> tuple[Tensor, Tensor]:
        """One pass, its gradients in the parameters; see `TrainingStep.backward`."""
        shape = _Shape(_layout(images), _layout(targets), criterion, passes)
        held = [p.grad for p in self._parameters]
        is_first = all(gradient is None for gradient in held)
        key = (shape, is_first, is_last)
        graph = self._graphs.get(key)
        if graph is None:
            self._in_a_row = self._in_a_row + 1 if shape == self._recent else 1
            self._recent = shape
            ready = self._in_a_row > self._warmup_passes and len(self._graphs) < _MOST_GRAPHS
            # Later passes can only add to what a graph's first pass has left.
            if not ready or not (is_first or self._are_a_graphs(held)):
                with self._capturer.warming_up():
                    return self._run(images, targets, criterion, passes, is_last)
            graph = self._graphs[key] = self._capture(images, targets, criterion, passes, is_last)
        elif not is_first and not _same(held, graph.gradients):
            return self._run(images, targets, criterion, passes, is_last)
        graph.images.copy_(images, non_blocking=True)
        graph.targets.copy_(targets, non_blocking=True)
        graph.replay()
        for parameter, gradient in zip(self._parameters, graph.gradients, strict=True):
            parameter.grad = gradient
        return graph.loss.clone(), graph.logits.clone()

    def _capture(
        self, images: Tensor, targets: Tensor, criterion: Criterion, passes: int, is_last: bool
    ) -> _Graph:
        images, targets = images.clone(), targets.clone()
        (loss, logits), replay = self._capturer.capture(
            lambda: self._run(images, targets, criterion, passes, is_last)
        )
        self._say(f"captured a CUDA graph for batches of {len(images)}")
        gradients = [p.grad for p in self._parameters]
        return _Graph(images, targets, loss, logits, gradients, replay)

    def _are_a_graphs(self, held: list[Tensor | None]) -> bool:
        return any(_same(held, graph.gradients) for graph in self._graphs.values())


def _same(some: list[Tensor | None], others: list[Tensor | None]) -> bool:
    return all(one is other for one, other in zip(some, others, strict=True))


def _layout(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), x.dtype
