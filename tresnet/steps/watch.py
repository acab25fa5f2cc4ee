"""Where something may look on at a step: nothing here; a memory prediction records."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor

Part = Literal["forward", "backward", "update"]


class Watch:
    """What surrounds the parts of a step on a real device; subclasses may record or replace them."""

    def during(self, part: Part) -> AbstractContextManager[Any]:
        """The surroundings of a part: "forward" with the loss, "backward", or "update"."""
        return contextlib.nullcontext()

    def autocast(
        self, device: torch.device, dtype: torch.dtype | None
    ) -> AbstractContextManager[Any]:
        """Autocast to a 16-bit type, or nothing for None."""
        if dtype is None:
            return contextlib.nullcontext()
        # Each weight is cast once a pass anyway, and copies kept beyond a captured pass would be stale.
        return torch.autocast(device.type, dtype=dtype, cache_enabled=False)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of the (scaled) loss to those of the parameters."""
        loss.backward()
