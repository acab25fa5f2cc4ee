"""Run functions in new processes without the seconds that importing torch takes.

The processes are forks of Python's fork server, which has imported torch but computed nothing. A
fork of pytest's process could not compute gradients if that process has threads of autograd.
"""

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

SERVER = multiprocessing.get_context("forkserver")
PRELOADED = """timm.loss timm.optim timm.utils torch._dynamo torch.distributed.run
    torchvision.transforms tresnet.engine.train"""
SERVER.set_forkserver_preload(PRELOADED.split())


class Ended(NamedTuple):
    """Exit code and output of a process, named as in `subprocess.CompletedProcess`."""

    returncode: int | None
    stdout: str
    stderr: str


def run_forked(
    action: Callable[..., object], *arguments: Any, folder: Path, **environment: str
) -> Ended:
    """Call a module's function in a new process in `folder`, and wait for its end.

    `environment` is added to this process's variables. The new process has already imported the
    packages of `PRELOADED`, so do not test here what a program imports.
    """
    with tempfile.TemporaryDirectory() as directory:
        outputs = Path(directory, "out"), Path(directory, "err")
        threads = environment.get("OMP_NUM_THREADS", torch.get_num_threads())
        settings = folder, {**os.environ, **environment}, outputs, int(threads)
        child = SERVER.Process(target=_run, args=(settings, action, arguments))
        child.start()
        try:
            child.join()
        except BaseException:
            child.kill()
            child.join()
            raise
        return Ended(child.exitcode, *(output.read_text(encoding="utf-8") for output in outputs))


def _run(settings: Any, action: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    folder, environment, outputs, threads = settings
    for name, path, number in zip(("stdout", "stderr"), outputs, (1, 2), strict=True):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(file, number)
        setattr(sys, name, os.fdopen(number, "w", closefd=False))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    action(*arguments)
