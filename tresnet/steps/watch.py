"""Where something may look on at a step: nothing here; a memory prediction records."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any, Literal

Part = Literal["forward", "backward", "update"]


class Watch:
    """What surrounds the parts of a step; a subclass may record them."""

    def during(self, part: Part) -> AbstractContextManager[Any]:
        """The surroundings of a part: "forward" with the loss, "backward", or "update"."""
        return contextlib.nullcontext()
