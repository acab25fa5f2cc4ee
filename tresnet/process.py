"""Handle this process's signals and standard streams."""

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, TextIO

# The command line that `tresnet` was called with; None in other programs.
command_line = ContextVar[list[str] | None]("command_line", default=None)

# Signals that stop a run. SLURM sends SIGUSR1 by `--signal`, and Windows has none.
STOPPING = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)
)


@contextlib.contextmanager
def handled(signals: Iterable[int], handler: Any) -> Iterator[None]:
    """Install `handler` for `signals` during the block; outside the main thread, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        signals = ()
    before = [(number, signal.signal(number, handler)) for number in signals]
    try:
        yield
    finally:
        for number, previous in before:
            signal.signal(number, previous)


def prepare_streams() -> None:
    """Replace a missing stdout or stderr by devnull; make both escape unencodable characters."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell or a service manager
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(ValueError):  # ignore a closed stream
                stream.reconfigure(errors="backslashreplace")


def redirect(stream: TextIO) -> None:
    """Redirect a stream's descriptor to devnull, so that no later write or flush fails."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
