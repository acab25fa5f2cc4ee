"""Options of each benchmark's command, with their checks.

The text under a field is its help. This module imports neither models nor PyTorch.
"""

import dataclasses
from pathlib import Path
from typing import Any

from tyro.conf import Suppress

from tresnet.errors import InputError
from tresnet.settings.fields import Count, Positive, Settings, Size, check


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """Options of every benchmark."""

    rounds: Count = 5
    """Visits to each contender; every round visits every one."""
    device: str | None = None
    """Device, such as cuda, cuda:1 or cpu; by default a GPU if there is one."""
    time_limit_s: Positive | None = None
    """Seconds. No case starts after three quarters of it; the record has what was measured."""
    case_limit_s: Positive | None = None
    """Seconds after which a contender's set-up and first round, or a later round, is stopped."""
    output_dir: Path = Path("benchmarks/records")
    """Directory of the record, which never replaces another one."""

    def check(self) -> None:
        """Raise `InputError` if an option is out of range."""
        check(self, InputError)

    def to_dict(self) -> dict[str, Any]:
        """Return the options for a record; a path becomes its last part."""
        values = {name: value for name, value in vars(self).items() if name != "output_dir"}
        return {k: v.resolve().name if isinstance(v, Path) else v for k, v in values.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSettings(RunSettings):
    """Options of `bench train` and `bench infer`."""

    warmup_steps: Count = 10
    """Untimed steps of each case, including compilation."""
    steps: Count = 10
    """Timed steps of each visit."""
    sequential: bool = False
    """Finish each case before the next is built, instead of taking turns: for cases that
    do not fit on the device together. Ratios are then not reported."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LargestSettings(RunSettings):
    """Options of `bench max-batch`; each case has an equal part of the time limit."""

    rounds: Suppress[int] = 0
    first: Size = 64
    """The batch tried first."""
    granularity: Count = 16
    """The result is a multiple of this."""
    at_most: Size | None = None
    """Try no larger batch; needed on a CPU."""
    gpu_memory: str | None = None
    """Limit of PyTorch's allocator, such as 79GiB, to emulate a smaller GPU. The CUDA context needs
    about half a GiB more."""

    def check(self) -> None:
        """Raise `InputError` if one is out of range."""
        super().check()
        if self.first % self.granularity:
            raise InputError(
                f"expected a first batch divisible by {self.granularity}, got {self.first}"
            )
        if self.at_most is not None and self.at_most < self.first:
            raise InputError(f"expected at_most of at least {self.first}, got {self.at_most}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseSettings(RunSettings):
    """Options of `memory measure`."""

    rounds: Suppress[int] = 0
    infer: bool = False
    """Inference instead of training."""
    case_limit_s: Positive | None = 300.0
    """Seconds a case may take."""
