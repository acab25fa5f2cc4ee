"""Hooks by which a memory prediction assigns operations to the parts of a step."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any, Literal

Part = Literal["forward", "backward", "optimizer"]


class StepHooks:
    """Hooks around the parts of a step; the default does nothing."""

    def during(self, part: Part) -> AbstractContextManager[Any]:
        """Return the context of "forward" (which includes the loss), "backward" or "optimizer"."""
        return contextlib.nullcontext()
