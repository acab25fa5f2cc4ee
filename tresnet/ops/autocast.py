"""Keeping an operation's dtype under autocast."""

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast_off(device_type: str) -> AbstractContextManager[object]:
    """Return a context in which autocast leaves dtypes alone on `device_type` ('meta' has none)."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
