"""Capture of CUDA graphs, by PyTorch's own functions."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch


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
        current.wait_event(self._used)  # graphs that share a memory pool must not run at once
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
                outputs = function()
        except Exception:
            generator.graphsafe_set_state(before)
            with contextlib.suppress(RuntimeError):  # raised if allocation has already ended
                torch._C._cuda_endAllocateToPool(device.index, self._pool)
            raise
        return outputs, graph.replay

    def same_random_numbers(self) -> AbstractContextManager[Any]:
        """Return a context that restores the random generators of CPU and GPU at its end."""
        return torch.random.fork_rng([self._stream.device])
