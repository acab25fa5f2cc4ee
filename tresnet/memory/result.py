"""What a prediction says."""

from dataclasses import dataclass

from tresnet.memory.device import Device
from tresnet.memory.events import Category, Operation, Trace
from tresnet.memory.plan import Plan
from tresnet.memory.replay import Replay
from tresnet.memory.sizes import MIB


@dataclass(frozen=True)
class Estimate:
    """A number of bytes and the band it is stated with."""

    expected_bytes: int
    low_bytes: int
    high_bytes: int

    @property
    def mib(self) -> float:
        """The expected size."""
        return self.expected_bytes / MIB

    @property
    def band_mib(self) -> tuple[float, float]:
        """The lowest and the highest size."""
        return self.low_bytes / MIB, self.high_bytes / MIB

    def __str__(self) -> str:
        low, high = self.band_mib
        return f"{self.mib:.1f} MiB ({low:.0f} to {high:.0f})"


@dataclass(frozen=True)
class Prediction:
    """Memory of one step, predicted.

    Three numbers that must not be mixed: `allocated` is the peak of what tensors hold
    (`torch.cuda.max_memory_allocated`), `reserved` the peak of what the caching allocator took
    from the device (`max_memory_reserved`), `device_total` that plus the stated context, which is
    what NVML shows. `end_allocated_bytes` is held once the steps are over.

    `by_category` sums to the expected `allocated`; `by_module` has the activations and their
    gradients alive at the peak. `peak_operation` is the operation that reached the peak.
    `out_of_memory` is the operation that did not fit into the device, if one did not.
    """

    model: str
    plan: Plan
    device: Device
    allocated: Estimate
    reserved: Estimate
    device_total: Estimate
    end_allocated_bytes: int
    by_category: dict[Category, int]
    by_module: dict[str, int]
    peak_operation: Operation | None
    out_of_memory: Operation | None
    notes: tuple[str, ...]
    seconds: float
    trace: Trace
    replay: Replay

    def __str__(self) -> str:
        lines = [
            f"{self.model}: {self.plan.describe()}",
            f"allocated     {self.allocated}",
            f"reserved      {self.reserved}",
            f"device total  {self.device_total}",
            f"peak at       {self.peak_operation}",
        ]
        if self.out_of_memory is not None:
            lines.append(f"out of memory at {self.out_of_memory}")
        lines += [f"  {name:<22}{n / MIB:>12.1f} MiB" for name, n in self.by_category.items()]
        return "\n".join([*lines, *self.notes])
