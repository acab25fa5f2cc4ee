"""Options of each benchmark's command, with checks of their values."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from typing_extensions import Doc

from tresnet.errors import InputError
from tresnet.settings import DeviceName
from tresnet.settings.fields import Count, MemorySize, Positive, Settings, Size, check, flatten

RoundCount = Annotated[Count, Doc("Number of rounds; each round times every case once.")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """Device, time limits and record."""

    device: DeviceName = "auto"
    time_limit_s: Positive | None = None
    """Time limit of the whole run in seconds. No case starts after three quarters of this time.
    The record keeps all measured cases."""
    case_limit_s: Positive | None = None
    """Time limit in seconds of a case's set-up plus first round, and of each later round."""
    output_dir: Path = Path("benchmarks/records")
    """Directory of the record. An existing record is never replaced."""

    def check(self) -> None:
        """Raise `InputError` if an option is out of range."""
        check(self, InputError)

    def to_dict(self) -> dict[str, Any]:
        """Return the options but `output_dir` as JSON values; of a path, only its name remains."""
        values = {name: value for name, value in flatten(self).items() if name != "output_dir"}
        return {k: v.resolve().name if isinstance(v, Path) else v for k, v in values.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSettings(RunSettings):
    """Device, steps, time limits and record."""

    rounds: RoundCount = 5
    warmup_steps: Count = 10
    """Untimed steps of each case, which run first and include compilation."""
    steps: Count = 10
    """Timed steps of each case in each round."""
    sequential: bool = False
    """Finish each case before building the next, for cases that do not fit on the device together.
    Ratios are then not reported."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LargestSettings(RunSettings):
    """Device, search, limits and record; the time limit is divided equally among the cases."""

    first: Size = 64
    """Batch size that is tried first."""
    granularity: Count = 16
    """The resulting batch size is a multiple of this number."""
    at_most: Size | None = None
    """Largest batch size to try; required on a CPU."""
    gpu_memory: MemorySize | None = None
    """Memory limit of PyTorch's allocator, such as 79GiB, to emulate a smaller GPU. The CUDA
    context needs about half a GiB in addition."""

    def check(self) -> None:
        super().check()
        if self.first % self.granularity:
            raise InputError(
                f"expected a first batch divisible by {self.granularity}, got {self.first}"
            )
        if self.at_most is not None and self.at_most < self.first:
            raise InputError(
                f"expected --at-most of at least {self.first} (--first), got {self.at_most}"
            )
