"""Processes of their own without the seconds in which one imports torch.

They are forks of Python's fork server, which has imported and computed nothing else: a fork of
pytest's own process could not compute gradients once that has threads of autograd.
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
    """End of a process, as `subprocess.run` reports it."""

    returncode: int | None
    stdout: str
    stderr: str


def run_forked(
    action: Callable[..., object], *arguments: Any, folder: Path, **environment: str
) -> Ended:
    """Call a function of a module in a process of its own, and wait for its end.

    It has a folder, an environment and outputs of its own. Not for what a start itself has to show,
    such as which packages are imported.
    """
    with tempfile.TemporaryDirectory() as directory:
        outputs = Path(directory, "out"), Path(directory, "err")
        threads = environment.get("OMP_NUM_THREADS", torch.get_num_threads())
        place = folder, {**os.environ, **environment}, outputs, int(threads)
        child = SERVER.Process(target=_run, args=(place, action, arguments))
        child.start()
        try:
            child.join()
        except BaseException:
            child.kill()
            child.join()
            raise
        return Ended(child.exitcode, *(output.read_text(encoding="utf-8") for output in outputs))


def _run(place: Any, action: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    folder, environment, outputs, threads = place
    for name, path, number in zip(("stdout", "stderr"), outputs, (1, 2), strict=True):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(file, number)
        setattr(sys, name, os.fdopen(number, "w", closefd=False))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    action(*arguments)
