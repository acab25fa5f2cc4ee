"""What a benchmark is told, and what it answers for each case."""

import dataclasses
import math
from typing import Any

from tresnet.errors import InputError
from tresnet.measure.cases import BenchCase
from tresnet.measure.memory import MemorySnapshot
from tresnet.measure.percentiles import Speed


def check_time_limit(limit_s: float | None) -> None:
    """Raise `InputError` unless it is None or above 0 and finite, as records hold no infinity."""
    if limit_s is not None and not 0 < limit_s < math.inf:
        raise InputError(f"expected a time limit above 0 s, got {limit_s}")


@dataclasses.dataclass(frozen=True)
class BenchSettings:
    """What all cases of a run share.

    Attributes:
        device: where to run, for example `cuda`, `cuda:1` or `cpu`.
        warmup_steps: untimed steps of each case before its memory is read, compilation included.
        rounds: visits to each case.
        steps_per_round: timed steps of each visit.
        interleave: visit every case in every round; else finish and free a case before the next
            is built (for cases that do not fit on the device together, CUDA graphs above all).
        seed: of weights and input.
        time_limit_s: after three quarters of it no case is begun, after all of it no round but the
            first; what was measured by then is the result. None for no limit.
    """

    device: str = "cpu"
    warmup_steps: int = 10
    rounds: int = 5
    steps_per_round: int = 10
    interleave: bool = True
    seed: int = 0
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        """Raise `InputError` for what nothing can be measured with."""
        for name, least in (("warmup_steps", 1), ("rounds", 1), ("steps_per_round", 1)):
            if getattr(self, name) < least:
                raise InputError(f"expected {name} of at least {least}, got {getattr(self, name)}")
        check_time_limit(self.time_limit_s)


class BenchInterrupt(KeyboardInterrupt):
    """The user stopped a benchmark.

    Attributes:
        rows: what was measured by then.
    """

    def __init__(self, rows: list[Any]) -> None:
        super().__init__("interrupted")
        self.rows = rows


@dataclasses.dataclass
class BenchRow:
    """A case and what came of it.

    Attributes:
        case: with every default resolved.
        status: `ok`, `out_of_memory`, `out_of_time` (not begun before the limit), `interrupted` (not
            timed when the user stopped the run), `failed` or
            `not_finite` (the loss or output was; timed all the same). Without figures they are None.
        error: first line of what went wrong.
        speed: percentiles over the timed steps of all rounds.
        ratio_to_first: median over the rounds of this case's p50 images/s over the first timed
            case's in the same round; None for what was not interleaved.
        round_p50_images_per_s: one value a round.
        memory: the case's own peaks in bytes, see the module's text.
        parameters: how many.
        warmup_s: seconds of building and warm-up, compilation included.
    """

    case: BenchCase
    status: str = "ok"
    error: str | None = None
    speed: Speed | None = None
    ratio_to_first: float | None = None
    round_p50_images_per_s: list[float] = dataclasses.field(default_factory=list)
    memory: MemorySnapshot | None = None
    parameters: int | None = None
    warmup_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The row for a record: flat, plain values, MiB, None for what was not measured."""
        speed = {field.name: None for field in dataclasses.fields(Speed)}
        if self.speed is not None:
            speed = dataclasses.asdict(self.speed)
        return {
            **dataclasses.asdict(self.case),
            "status": self.status,
            "error": self.error,
            "parameters": self.parameters,
            **speed,
            "ratio_to_first": self.ratio_to_first,
            "round_p50_images_per_s": self.round_p50_images_per_s,
            **(self.memory or MemorySnapshot()).to_dict(),
            "warmup_s": self.warmup_s,
        }
