"""The document's notebook, replayed cell after cell as one process.

Every earlier model stays on the device with its gradients, as in the notebook; each cell empties
the cache and starts the peak again. One cuBLAS workspace a handle lasts for all of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tresnet.memory.allocator import Block, CachingAllocator
from tresnet.memory.device import GENERIC, Device
from tresnet.memory.events import Trace
from tresnet.memory.machine import FakeMachine
from tresnet.memory.plan import make_plan
from tresnet.memory.sizes import MIB
from tresnet.memory.step import start
from tresnet.memory.subjects import SUBJECTS, Subject
from tresnet.memory.workspaces import Workspaces
from tresnet.models.named import build_without_data

# Each cell trains for more, but the second step reaches the peak of all later ones.
_STEPS = 2


@dataclass(frozen=True)
class Cell:
    """What one cell prints, predicted. `peak_high_mib` has workspaces at their highest."""

    name: str
    leftover_mib: float
    peak_mib: float
    peak_high_mib: float
    end_mib: float
    reserved_mib: float

    @property
    def alone_mib(self) -> float:
        """The peak less what earlier cells left behind."""
        return self.peak_mib - self.leftover_mib


def replay_notebook(
    subjects: Iterable[Subject] | None = None, device: Device = GENERIC
) -> list[Cell]:
    """Run the subjects one after another on one fake machine.

    Raises:
        MissingDependencyError: a subject's package is not installed.
    """
    machine = FakeMachine(device, Workspaces())
    chosen = list(SUBJECTS.values() if subjects is None else subjects)
    ends, kept = [], []
    for subject in chosen:
        model = build_without_data(subject.build)
        plan = make_plan(model, **subject.step)
        copied = machine.copy(model, plan)
        with machine.running():
            machine.place(copied, plan)
            run = start(copied, plan, machine)
            for _ in range(_STEPS):
                run.step()
            ends.append(len(machine.trace.events))
            del run
        kept.append(copied)
    trace = machine.trace.settled()
    return _print_cells([s.name for s in chosen], trace, ends, device.capacity_bytes)


def _print_cells(
    names: list[str], trace: Trace, ends: list[int], capacity_bytes: int | None
) -> list[Cell]:
    allocator = CachingAllocator(capacity_bytes)
    blocks: dict[int, Block | None] = {}
    cells, begin = [], 0
    for name, end in zip(names, ends, strict=True):
        allocator.empty_cache()
        allocator.reset_peaks()
        leftover, high = allocator.allocated_bytes, 0
        for event in trace.events[begin:end]:
            if event.alive:
                blocks[event.buffer] = allocator.malloc(trace.buffers[event.buffer].n_bytes)
                borrowed = trace.operations[event.op].workspace_high_bytes
                high = max(high, allocator.allocated_bytes + borrowed)
            else:
                allocator.free(blocks.pop(event.buffer))
        cells.append(
            Cell(
                name,
                leftover / MIB,
                allocator.peak_allocated_bytes / MIB,
                high / MIB,
                allocator.allocated_bytes / MIB,
                allocator.peak_reserved_bytes / MIB,
            )
        )
        begin = end
    return cells
