"""Hooks by which a memory prediction assigns operations to the parts of a step."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any, Literal

Part = Literal["forward", "backward", "optimizer"]


class StepHooks:
    """Hooks around the parts of a step; the default does nothing."""

    def during(self, part: Part) -> AbstractContextManager[Any]:
        """Return a context in which `part` of the step runs; "forward" includes the loss."""
        return contextlib.nullcontext()
