"""Start the processes that load images and share memory with them, for every start method.

The start method is Python's default, or what the program has set, because Python weighs the risk:
until 3.13, Linux forks the main process, where a thread of CUDA or NCCL may hold a lock at that
moment. From 3.14 on, workers are forks of a fork server without threads; `prepare` makes it import
what workers import, so they start as quickly. On macOS and Windows each worker imports torch anew.
"""

import errno
import io
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import heap, util
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader

from tresnet.errors import DataError
from tresnet.process import STOPPING

# What workers import. The fork server imports those of them that this process has imported.
_IMPORTS = """tresnet.data.loaders tresnet.data.transforms tresnet.data.policy pyarrow
    timm.data.random_erasing timm.data.transforms torchvision.transforms PIL.JpegImagePlugin"""
_ALIGNMENT = 64


class SharedMemory:
    """Memory of `size` bytes that this process and its workers map; unused pages take no memory.

    On Linux it has no file, so that the size of /dev/shm is no limit, and nothing remains of it
    after the last process. Elsewhere it is that of `multiprocessing.Array`.
    """

    def __init__(self, size: int) -> None:
        if hasattr(os, "memfd_create"):
            file = os.memfd_create("tresnet")
            os.ftruncate(file, size)
            self._arena = heap.Arena(size, file)
            util.Finalize(self, os.close, (file,))
        else:
            self._arena = heap.Arena(size)

    def view(self, begin: int, end: int) -> np.ndarray:
        """Return the bytes from `begin` to `end` as an array, uint8, without a copy."""
        return np.frombuffer(self._arena.buffer, np.uint8, end - begin, begin)


class Shared:
    """Stands for `value` where workers are not forked: pickled, it becomes the value itself.

    The value's arrays are copied once into memory that all workers map. Otherwise each of them
    would receive and store its own copy of the labels and paths, 1 GB for 14 million images.
    """

    def __init__(self, value: object) -> None:
        self._value = value
        self._memory: SharedMemory | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        pickler = pickle.Pickler(file, 5, buffer_callback=buffers.append)
        pickler.dispatch_table = {**ForkingPickler(file).dispatch_table, torch.Tensor: _reduce}
        pickler.dump(self._value)
        spans, end = [], 0
        for buffer in buffers:
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = begin + buffer.raw().nbytes
            spans.append((begin, end))
        if self._memory is None:
            self._memory = SharedMemory(max(end, 1))
            for buffer, span in zip(buffers, spans, strict=True):
                self._memory.view(*span)[:] = buffer.raw()
        return _load, (file.getvalue(), self._memory, spans)


def _load(data: bytes, memory: SharedMemory, spans: list[tuple[int, int]]) -> Any:
    loads: Any = ForkingPickler.loads  # type: ignore[attr-defined]  its stub takes it for a method
    return loads(data, buffers=[memory.view(*span) for span in spans])


def _reduce(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Pickle a tensor as an array, because torch would move its memory to files in /dev/shm."""
    try:
        return torch.from_numpy, (tensor.numpy(),)
    except (TypeError, RuntimeError):  # NumPy cannot represent it
        return reduce_tensor(tensor)


def start_method() -> str:
    """Return how processes are started, without fixing it for the program."""
    default = multiprocessing.get_all_start_methods()[0]
    return multiprocessing.get_start_method(allow_none=True) or default


def prepare() -> None:
    """Start Python's fork server if workers come from it; it imports while this process goes on."""
    if start_method() != "forkserver":
        return
    from multiprocessing import forkserver

    names = [name for name in _IMPORTS.split() if name in sys.modules]
    present: list[str] = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
    wanted = [*present, *names, "tresnet.data.fork_server"]
    forkserver.set_forkserver_preload(list(dict.fromkeys(wanted)))
    with _signals_blocked():
        forkserver.ensure_running()


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block `STOPPING`, also in processes that start here, until these call `detach`."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows cannot block signals
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield all batches; raise DataError if workers cannot be started, or if one has died."""
    failure, batches = "", None
    try:
        with _signals_blocked():  # while workers start
            batches = _begin(loader)
        yield from batches
    except RuntimeError as error:  # also at the start, of a worker that died between two epochs
        failure = str(error)
        if re.match(r"DataLoader worker \(pid", failure) is None:
            raise
    if failure:  # outside of the block above, because its error would keep other workers alive
        del batches
        raise DataError(
            f"a process that loads images has died ({failure.splitlines()[0].strip()}): if the"
            " system killed it for lack of memory, use fewer --workers or smaller image files"
        )


def _begin(loader: DataLoader[Any]) -> Iterator[Any]:
    if multiprocessing.current_process().daemon and loader.num_workers:
        raise DataError(
            "no processes that load images can be started by a daemonic process, such as one of a"
            " multiprocessing.Pool: use --workers 0"
        )
    try:
        return iter(loader)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise DataError(
            "no processes that load images can be started, because their semaphores find no space"
            " in /dev/shm: free or enlarge it (docker run --shm-size), or use --workers 0"
        ) from error


def start_worker(worker: int) -> None:
    """Let a new worker ignore `STOPPING` but SIGTERM, and end when the main process ends."""
    detach(signal.SIG_IGN)
    # As `cli.shell.run` does; workers that are not forked do not inherit it.
    warnings.filterwarnings("ignore", "Image size .* exceeds limit")
    threading.Thread(target=_end_with_parent, daemon=True).start()


def detach(handler: Any) -> None:
    """Put this process into a new process group, and discard signals of `STOPPING`.

    SIGTERM gets its default action, and the others get `handler`.
    """
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # terminals and torchrun send signals to the whole group
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)  # also discards a pending signal
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else handler)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def _end_with_parent() -> None:
    # DataLoader compares the parent's process id, but this is that of the fork server.
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a worker"
    parent.join()
    os._exit(1)
