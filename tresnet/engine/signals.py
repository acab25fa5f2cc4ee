"""Turns Ctrl-C and SIGTERM into a request to stop after the step under way."""

import os
import signal
import threading
import time
from typing import Self

# torchrun passes a Ctrl-C on to processes that the terminal has already told: one request, twice.
ECHO_S = 2.0
UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID"
STOPPING = (signal.SIGINT, signal.SIGTERM)
HANGUP = getattr(signal, "SIGHUP", None)  # Windows has none


class StopRequest:
    """While entered, the first signal sets `signum`; a second one, later, stops at once.

    A hangup is ignored, as a run outlives its terminal, except under torchrun: it passes a hangup
    on to stop its processes. Outside the main thread Python allows no handlers, so nothing is
    caught.
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
        if HANGUP is not None and signal.getsignal(HANGUP) == signal.SIG_DFL:  # so not with nohup
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
