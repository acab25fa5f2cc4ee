"""Hooks around the parts of a step, which a memory prediction uses to attribute operations."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any, Literal

Part = Literal["forward", "backward", "optimizer"]


class StepHooks:
    """Hooks around the parts of a step; the default does nothing."""

    def during(self, part: Part) -> AbstractContextManager[Any]:
        """Return the context of a part: "forward" with the loss, "backward", or "optimizer"."""
        return contextlib.nullcontext()
