"""The processes of a run: torchrun's environment, collectives, and signals that stop a run.

`join` yields a `Processes`, whose collectives also work with one process. Python objects are sent
by gloo, which does not wait for queued GPU work. GPU tensors are sent by nccl.
"""

import contextlib
import dataclasses
import datetime
import os
import signal
import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from tresnet.devices import timed_device
from tresnet.engine.console import Console
from tresnet.errors import ConfigError, InputError
from tresnet.process import STOPPING, handled

# Timeout of collectives, longer than compilation or a checkpoint on a slow disk. After a timeout
# torchrun may restart the run, and `--resume auto` continues it from the last checkpoint.
TIMEOUT_MIN = 10
# At Ctrl-C, the terminal and torchrun both send SIGINT. Signals within this time count as one.
ECHO_S = 2.0
HANGUP = getattr(signal, "SIGHUP", None)  # Windows has no SIGHUP


@dataclasses.dataclass(frozen=True)
class Processes:
    """Rank, world size, device and console of this process; the methods are collectives."""

    rank: int
    world_size: int
    device: torch.device
    console: Console = dataclasses.field(default_factory=lambda: Console(False, False))

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and shows progress; this is not a collective."""
        return self.rank == 0

    def sum(self, *values: float, op: Any = dist.ReduceOp.SUM) -> list[float]:
        """Reduce each value over all processes in float64; the default `op` returns the sums."""
        reduced = torch.tensor(values, dtype=torch.float64)
        if self.world_size > 1:
            dist.all_reduce(reduced, op=op)
        return reduced.tolist()

    def max(self, *values: float) -> list[float]:
        return self.sum(*values, op=dist.ReduceOp.MAX)

    def from_main(self, value: Any) -> Any:
        """Return process 0's `value` on every process; all processes' values must be picklable."""
        return self.gather(value)[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the list of all processes' values, in order of rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for all processes, on their devices: the first call makes NCCL's communicator."""
        if self.world_size > 1:
            dist.all_reduce(torch.zeros((), device=self.device))

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy process 0's tensors to every process."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)


class StopRequest(contextlib.ExitStack[bool | None]):
    """Context manager in which a signal to stop only sets `signum`, so that the run can save first.

    A second signal raises KeyboardInterrupt if it comes more than `ECHO_S` after the first. Under
    torchrun, SIGHUP stops the run, because torchrun sends SIGHUP to end its processes. Otherwise
    SIGHUP is ignored, so that a run outlives its terminal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.signum, self._first_signal_s = 0, 0.0

    def __enter__(self) -> Self:
        self.enter_context(handled(STOPPING, self._handle))
        if HANGUP is not None and signal.getsignal(HANGUP) == signal.SIG_DFL:  # nohup sets SIG_IGN
            stops = "TORCHELASTIC_RUN_ID" in os.environ
            self.enter_context(handled([HANGUP], self._handle if stops else signal.SIG_IGN))
        return super().__enter__()

    def _handle(self, signum: int, _: object) -> None:
        now = time.monotonic()
        if not self.signum:
            self.signum, self._first_signal_s = signum, now
        elif now - self._first_signal_s > ECHO_S:
            raise KeyboardInterrupt


@contextlib.contextmanager
def join(device: str, progress: bool = False, stream: str = "stdout") -> Iterator[Processes]:
    """Join torchrun's processes, if any; yield `Processes`. A bad `device` raises ConfigError.

    `progress` and `stream` are arguments of the processes' `Console`.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    chosen = pick_device(device, int(os.environ.get("LOCAL_RANK", "0")), world_size)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)  # nccl works on the current device
        torch.backends.cudnn.benchmark = True  # cuDNN times its algorithms once per shape
        torch.backends.cudnn.benchmark_limit = 0  # all algorithms, as in `tresnet bench`
    if world_size == 1:
        yield Processes(0, 1, chosen, Console(True, progress, stream))
        return
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    timeout = datetime.timedelta(minutes=TIMEOUT_MIN)
    # Python's handlers do not run while C++ waits here, so with SIG_DFL a signal ends the process.
    with handled(STOPPING, signal.SIG_DFL):
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        store = dist.PrefixStore(new_prefix(store, rank, world_size, timeout), store)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout
        )
    yield Processes(rank, world_size, chosen, Console(rank == 0, progress, stream))
    # Not in a `finally` block: a failing process would wait here forever for the other processes.
    # torchrun ends the others only after a process has exited with an error.
    dist.destroy_process_group()


def new_prefix(store: dist.Store, rank: int, world_size: int, timeout: datetime.timedelta) -> str:
    """Return a new prefix for the store's keys, equal on all processes.

    torchrun keeps one store when it restarts processes. Without a new prefix, a process may read
    the address of an ended process. The restart then fails (torch 2.15: in two of three tries).
    torchrun's environment has no such prefix: if a process of one of two machines fails,
    `TORCHELASTIC_RESTART_COUNT` becomes 1 there and stays 0 on the other.

    Process 0 chooses the prefix. Each other process writes a random name into the store. Process 0
    stores the prefix under each name, and waits until all other processes have read the prefix.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"name/{rank}", own)
        prefix = store.get(f"prefix/{own}").decode()
        store.set(f"{prefix}/received/{rank}", "yes")
        return prefix
    names = [f"name/{other}" for other in range(1, world_size)]
    received = [f"{own}/received/{other}" for other in range(1, world_size)]
    deadline = time.monotonic() + timeout.total_seconds()
    while not store.check(received):
        for key in names:
            if store.check([key]):  # an ended process may have set this key
                store.set(f"prefix/{store.get(key).decode()}", own)
        if time.monotonic() > deadline:
            came = sum(store.check([key]) for key in received)
            raise ConfigError(
                f"expected {world_size} processes, {came} of the other {world_size - 1} have come"
                " in time: see the output of the missing ones"
            )
        time.sleep(0.01)
    return own


def pick_device(name: str, local_rank: int, world_size: int) -> torch.device:
    """Return the device `name`, or raise ConfigError; `cuda` means the GPU number `local_rank`."""
    if name.startswith("cuda:") and world_size > 1:
        raise ConfigError(
            f"--device: {world_size} processes need a GPU each, got the one GPU {name!r}"
        )
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        name = f"cuda:{local_rank}"
    try:
        return timed_device(name)
    except InputError as error:
        raise ConfigError(f"--device: {error}") from error
