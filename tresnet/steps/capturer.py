"""Capture of CUDA graphs with `torch.cuda.graph`."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


class CudaCapturer:
    """Capturer of CUDA graphs, with one stream and one memory pool for all its graphs."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._last_use = torch.cuda.Event()

    @contextlib.contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        """Run the block on the capture stream, between past and future work of the current one."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    @contextlib.contextmanager
    def serialized(self) -> Iterator[None]:
        """Let GPU work of the `with` block wait for GPU work of the previous `serialized` block."""
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_event(self._last_use)  # graphs that share a memory pool must not overlap
        yield
        self._last_use.record(current)

    def capture(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Capture a call of `function`; return its outputs, and a function that fills them anew.

        A capture runs no kernels: only a replay fills the outputs. If a capture fails, this method
        restores the current stream, random generator and allocator, because PyTorch may not.
        """
        graph, device = torch.cuda.CUDAGraph(), self._stream.device
        generator = torch.cuda.default_generators[device.index]
        before = generator.clone_state()
        # "thread_local" lets other threads, such as those of a user's loader that pins, call CUDA.
        options: Any = {"stream": self._stream, "capture_error_mode": "thread_local"}
        try:
            with (
                torch.cuda.stream(torch.cuda.current_stream(device)),
                torch.cuda.graph(graph, self._pool, **options),
            ):
                outputs = function()
        except Exception:
            generator.graphsafe_set_state(before)
            with contextlib.suppress(RuntimeError):  # the allocation to the pool may have ended
                torch._C._cuda_endAllocateToPool(device.index, self._pool)
            raise
        return outputs, graph.replay
