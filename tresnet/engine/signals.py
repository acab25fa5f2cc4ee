"""Requests to stop: Ctrl-C and SIGTERM end a run after the current step."""

import os
import signal
import threading
import time
from typing import Self

# The terminal and torchrun both send Ctrl-C to a process: within this time it is one request.
ECHO_S = 2.0
UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID"
STOPPING = (signal.SIGINT, signal.SIGTERM)
HANGUP = getattr(signal, "SIGHUP", None)  # Windows has none


class StopRequest:
    """While entered, the first signal sets `signum`; a later second one stops at once.

    A hangup is ignored, as a run outlives its terminal, except under torchrun, which forwards a
    hangup to stop its processes. Python allows handlers only in the main thread; elsewhere nothing
    is caught.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._asked_s = 0.0
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        for signum in STOPPING:
            self._previous[signum] = signal.signal(signum, self._handle)
        if HANGUP is not None and signal.getsignal(HANGUP) == signal.SIG_DFL:  # nohup ignores it
            stops = UNDER_TORCHRUN in os.environ
            self._previous[HANGUP] = signal.signal(
                HANGUP, self._handle if stops else signal.SIG_IGN
            )
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)  # pyright: ignore[reportArgumentType]
        self._previous.clear()

    def _handle(self, signum: int, _: object) -> None:
        now = time.monotonic()
        if not self.signum:
            self.signum, self._asked_s = signum, now
        elif now - self._asked_s > ECHO_S:
            raise KeyboardInterrupt
