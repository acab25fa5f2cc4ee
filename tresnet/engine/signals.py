"""Requests to stop: Ctrl-C and SIGTERM end a run after the current step."""

import contextlib
import os
import signal
import time
from typing import Self

from tresnet.files import handled

# The terminal and torchrun both send Ctrl-C to a process: within this time it is one request.
ECHO_S = 2.0
UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID"
STOPPING = (signal.SIGINT, signal.SIGTERM)
HANGUP = getattr(signal, "SIGHUP", None)  # Windows has none


class StopRequest(contextlib.ExitStack[bool | None]):
    """While entered, the first signal sets `signum`; a second one after `ECHO_S` stops at once.

    A hangup is ignored, as a run outlives its terminal. Under torchrun it is a request to stop, as
    torchrun forwards hangups for that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.signum, self._asked_s = 0, 0.0

    def __enter__(self) -> Self:
        self.enter_context(handled(STOPPING, self._handle))
        if HANGUP is not None and signal.getsignal(HANGUP) == signal.SIG_DFL:  # nohup ignores it
            stops = UNDER_TORCHRUN in os.environ
            self.enter_context(handled([HANGUP], self._handle if stops else signal.SIG_IGN))
        return super().__enter__()

    def _handle(self, signum: int, _: object) -> None:
        now = time.monotonic()
        if not self.signum:
            self.signum, self._asked_s = signum, now
        elif now - self._asked_s > ECHO_S:
            raise KeyboardInterrupt
