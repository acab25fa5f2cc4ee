"""Print a run's messages and progress bars; a closed terminal does not stop the run."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Self

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from tresnet.process import redirect


class Console:
    """Terminal output of process 0: lines and progress bars. Other processes print warnings."""

    def __init__(self, is_main: bool, progress: bool, stream: str = "stdout") -> None:
        self._is_main, self._stream = is_main, stream
        self.shows_bars = is_main and progress and sys.stderr.isatty()
        self.broken: OSError | None = None  # the last error from writing to a stream

    def say(self, text: str) -> None:
        if self._is_main:
            self.warn(text)

    def warn(self, text: str) -> None:
        """Print a line, on whichever process this is."""
        with self.ignoring_errors():
            stream = getattr(sys, self._stream)
            tqdm.write(text, file=stream)
            stream.flush()

    @contextlib.contextmanager
    def ignoring_errors(self) -> Iterator[None]:
        """Ignore OSErrors of the block; after one, show no new bar and discard failing streams."""
        try:
            yield
        except OSError as error:
            self.broken, self.shows_bars = error, False
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except OSError:
                    redirect(stream)


class Bar:
    """Context manager that shows a progress bar from `done` to `total` steps on a terminal."""

    def __init__(self, console: Console, title: str, total: int, done: int = 0) -> None:
        self._console = console
        self._settings = {"desc": title, "total": total, "initial": done}
        self._entered = contextlib.ExitStack()
        self._tqdm = tqdm(disable=True)

    def __enter__(self) -> Self:
        shows = self._console.shows_bars
        with self._console.ignoring_errors():
            self._tqdm = tqdm(**self._settings, leave=False, dynamic_ncols=True, disable=not shows)
            self._entered.callback(self._tqdm.close)
            if shows:
                self._entered.enter_context(logging_redirect_tqdm())
        return self

    def __exit__(self, *_: object) -> None:
        with self._console.ignoring_errors():
            self._entered.close()

    def advance(self) -> None:
        with self._console.ignoring_errors():
            self._tqdm.update()

    def show(self, text: str, line: bool) -> None:
        """Show `text` after the bar; if no bar is shown and `line` is true, print `text`."""
        if not self._tqdm.disable:
            with self._console.ignoring_errors():
                self._tqdm.set_postfix_str(text)
        elif line and not self._console.shows_bars:
            self._console.say(f"{self._settings['desc']}  {text}")
