"""Processes of their own without the seconds in which one imports torch: forks of this one."""

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Ended(NamedTuple):
    """How a process ended, as `subprocess.run` says it."""

    returncode: int
    stdout: str
    stderr: str


def run_forked(action: Callable[[], object], folder: Path, **environment: str) -> Ended:
    """Do something in a process that starts where this one is, and wait for its end.

    It has a folder, an environment and outputs of its own. Not for what a start itself has to show,
    such as which packages are imported.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            for name, file, number in (("stdout", out, 1), ("stderr", err, 2)):
                os.dup2(file.fileno(), number)
                setattr(sys, name, os.fdopen(number, "w", closefd=False))
            code: object = 1
            try:
                os.chdir(folder)
                os.environ.update(environment)
                action()
                code = 0
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code if isinstance(code, int) else 1)
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        except BaseException:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        out.seek(0)
        err.seek(0)
        return Ended(code, out.read().decode(), err.read().decode())
