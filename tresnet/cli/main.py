"""Entry point of the `tresnet` command."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

from tresnet.cli.output import fail, say
from tresnet.errors import TResNetError
from tresnet.files import prepare_streams, redirect

BAD_INPUT_EXIT_CODE = 2
BROKEN_PIPE_EXIT_CODE = 141  # 128 + SIGPIPE
INTERRUPTED_EXIT_CODE = 130  # 128 + SIGINT, as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: the arguments after the program's name; None for this process's.

    Returns:
        0; 1 if a part of the work failed (the rest is done); 2 for bad input; 130 on Ctrl-C;
        141 when nobody reads the output any more.

    Raises:
        SystemExit: after `--help` (0) or arguments that do not parse (2).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    with _noted_interrupts() as interrupts:
        try:
            if os.environ.get("NO_COLOR"):
                os.environ.setdefault("PYTHON_TYRO_ANSI_CODES", "False")  # read as tyro is imported
            prepare_streams()
            return _run(arguments)
        except Exception:
            if not interrupts:
                raise
        except KeyboardInterrupt:
            pass
    fail("interrupted")
    return INTERRUPTED_EXIT_CODE


@contextlib.contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """Note each Ctrl-C: what is interrupted while it is imported raises nearly anything."""
    noted: list[int] = []

    def note(number: int, _: object) -> None:
        noted.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def _run(arguments: list[str]) -> int:
    try:
        if arguments == ["--version"]:
            from tresnet.env import package_version

            say(f"tresnet {package_version() or 'of unknown version'}")
            code = 0
        else:
            from tresnet.cli.commands import parse

            code = parse(arguments).run(["tresnet", *arguments])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` say, has gone: nothing is left to say
        redirect(sys.stdout)
        return BROKEN_PIPE_EXIT_CODE
    except TResNetError as error:
        fail(error)
        return BAD_INPUT_EXIT_CODE
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        redirect(sys.stdout)
        fail(f"the output cannot be written: {error.strerror}")
        return BAD_INPUT_EXIT_CODE
    except (RuntimeError, MemoryError) as error:
        from tresnet.measure.memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        fail(f"the memory is full: {str(error).partition(chr(10))[0]}: ask for smaller sizes")
        return BAD_INPUT_EXIT_CODE
    return code


if __name__ == "__main__":
    sys.exit(main())
