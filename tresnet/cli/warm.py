"""`tresnet warm`: compile the Triton kernels of a step before it runs."""

import dataclasses
from typing import Annotated

from tyro.conf import Positional, arg

from tresnet.cli.memory import settings_of
from tresnet.cli.output import progress, say
from tresnet.measure.cases import CaseSettings


@dataclasses.dataclass(frozen=True)
class Warm(CaseSettings):
    """Compile the Triton kernels of a training step, and of its evaluation, ahead of time.

    They go into Triton's cache, where the first step finds them. The same at every batch size.
    """

    model: Annotated[Positional[str], arg(metavar="MODEL")] = "tresnet_m"
    """One of ours."""

    batch_size: int = 64
    """Images a pass."""

    infer: bool = False
    """Inference instead of training."""

    target: str | None = None
    """Such as sm_90, an H100; by default the GPU that is there."""

    processes: int | None = None
    """That compile; by default one a core."""

    def run(self, argv: list[str]) -> int:
        """Compile, and say how many there are."""
        import time

        from tresnet.engine.warm import warm

        began_s = time.perf_counter()
        count = warm(
            self.model,
            target=self.target,
            processes=self.processes,
            infer=self.infer,
            say=progress,
            batch_size=self.batch_size,
            **settings_of(self),
        )
        say(f"{count} kernels, {time.perf_counter() - began_s:.1f} s")
        return 0
