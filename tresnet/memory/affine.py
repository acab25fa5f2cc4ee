"""Traces of any batch size, foreseen from two."""

from dataclasses import replace

from tresnet.errors import InputError
from tresnet.memory.events import Buffer, Operation, Trace
from tresnet.memory.workspaces import HIGH_LIMIT_BYTES


class AffineTrace:
    """Two traces of one step at two batch sizes, and the line through every buffer's size.

    Raises:
        InputError: the traces differ in more than sizes, so nothing follows from them.
    """

    def __init__(self, first: tuple[int, Trace], second: tuple[int, Trace]) -> None:
        (self._n, self._trace), (other_n, other) = first, second
        if self._trace.events != other.events:
            raise InputError(
                f"expected a model that does the same at every batch size, got other operations "
                f"at batch {other_n} than at {self._n}: predict each batch size instead"
            )
        span = other_n - self._n
        pairs = zip(self._trace.buffers, other.buffers, strict=True)
        self._growth = [(b.n_bytes - a.n_bytes) / span for a, b in pairs]
        pairs = zip(self._trace.operations, other.operations, strict=True)
        self._high_growth = [
            (b.workspace_high_bytes - a.workspace_high_bytes) / span for a, b in pairs
        ]

    def at(self, batch_size: int) -> Trace:
        """The trace a batch of this size would give."""
        more = batch_size - self._n
        buffers = [
            Buffer(_grown(b.n_bytes, growth, more), b.category, b.module, b.op)
            for b, growth in zip(self._trace.buffers, self._growth, strict=True)
        ]
        operations = [
            _with_high(o, growth, more)
            for o, growth in zip(self._trace.operations, self._high_growth, strict=True)
        ]
        return Trace(buffers, operations, self._trace.events, self._trace.step_starts)


def _with_high(operation: Operation, growth: float, more: int) -> Operation:
    if not growth:
        return operation
    high = min(_grown(operation.workspace_high_bytes, growth, more), HIGH_LIMIT_BYTES)
    return replace(operation, workspace_high_bytes=high)


def _grown(n_bytes: int, growth: float, more: int) -> int:
    return max(round(n_bytes + growth * more), 0)
