"""Run a command, and handle its standard streams, interrupts, errors and exit code."""

import contextlib
import errno
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import NoReturn

from tresnet import cores
from tresnet.errors import TResNetError
from tresnet.process import handled, prepare_streams, redirect

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE = 141  # 128 + SIGPIPE
_FULL = (errno.ENOSPC, errno.EIO)

# Messages for errors of the machine. Keys are words of PyTorch's or the system's error.
_MACHINE_ERRORS = {
    "Too many open files": (
        "the limit of open files of this process is reached: raise it by ulimit -n 4096, or try"
        " fewer --workers; a run continues from its last checkpoint by --resume"
    ),
    # "(pid" excludes exceptions in workers, whose messages say "in DataLoader worker process 0".
    "DataLoader worker (pid": (
        "a process that loads images has ended: {}. Try fewer --workers; a run continues from its"
        " last checkpoint by --resume"
    ),
    "gloo": "another process has ended or cannot be reached: {}",
}


def arguments() -> list[str]:
    """Return this process's arguments; `--option=~/...` has the home, where shells leave the ~."""
    home = os.path.expanduser("~")
    return [re.sub(r"^(--[\w-]+=)~(?=/|$)", lambda m: m[1] + home, text) for text in sys.argv[1:]]


def run(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; errors that users can cause become messages.

    `command` should import its modules when called, so that Ctrl-C is caught during imports. The
    code is 130 for Ctrl-C and 141 for a closed pipe. It is 2 for bad input, full memory or a full
    disk, and 1 for errors such as a dead worker. `--help` raises SystemExit(0). Arguments that
    cannot be parsed raise SystemExit(2).
    """
    cores.share()
    with _recorded_interrupts() as interrupts, warnings.catch_warnings():
        # Pillow's warning of an image above its limit of pixels does not name the image, so the
        # warning is off. Above twice the limit, Pillow raises an error.
        warnings.filterwarnings("ignore", "Image size .* exceeds limit")
        try:
            prepare_streams()
            try:
                return command()
            finally:
                sys.stdout.flush()
        except KeyboardInterrupt:
            pass
        except Exception as error:
            if not interrupts:
                return _code_of(error)
    return _fail("interrupted", INTERRUPTED)


def leave(code: int) -> NoReturn:
    """Exit with a code; under torchrun, skip the shutdown of the interpreter."""
    # in the shutdown, gloo's threads may raise SIGABRT, which torchrun reports as a failed run
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


@contextlib.contextmanager
def _recorded_interrupts() -> Iterator[list[int]]:
    """Record each Ctrl-C, because an import may turn KeyboardInterrupt into another error."""
    interrupts: list[int] = []

    def interrupt(number: int, _: object) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    with handled([signal.SIGINT], interrupt):
        yield interrupts


def _code_of(error: Exception) -> int:
    """Print what a user can do about an error, and return the exit code; raise other errors."""
    if isinstance(error, TResNetError):
        return _fail(str(error), BAD_INPUT)
    if isinstance(error, BrokenPipeError):  # the reader, for example `head`, has closed the pipe
        redirect(sys.stdout)
        return BROKEN_PIPE
    if not isinstance(error, RuntimeError | OSError | MemoryError):
        raise error
    text = " ".join(str(error).split())
    for words, message in _MACHINE_ERRORS.items():
        if words in text:
            return _fail(message.format(text), FAILED)
    # an error with a file's name is not from standard output
    if isinstance(error, OSError) and error.filename is None and error.errno in _FULL:
        redirect(sys.stdout)
        return _fail(f"the output cannot be written: {error.strerror}", BAD_INPUT)
    from tresnet.measure.memory_meter import is_out_of_memory

    if not is_out_of_memory(error):
        raise error
    first = str(error).partition("\n")[0] or type(error).__name__
    advice = "choose a smaller batch, smaller images, or --amp auto"
    return _fail(f"the memory is full: {first}: {advice}", BAD_INPUT)


def _fail(message: str, code: int) -> int:
    rank = os.environ.get("RANK", "0")
    try:
        sys.stderr.write(f"error: {'' if rank == '0' else f'process {rank}: '}{message}\n")
        sys.stderr.flush()
    except OSError:
        redirect(sys.stderr)
    return code
