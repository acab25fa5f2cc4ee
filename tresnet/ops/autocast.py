"""What autocast does to an operation, and keeping it out."""

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast_off(device_type: str) -> AbstractContextManager[object]:
    """Return a context in which autocast leaves dtypes alone on `device_type` ('meta' has none)."""
    if autocast_dtype(device_type) is not None:
        return torch.autocast(device_type, enabled=False)
    return nullcontext()  # entering one of autocast's takes as long as a launch


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that autocast computes in on `device_type`, None where it is off."""
    # torch.amp.is_autocast_available would say it, but the compiler of torch 2.11 does not know it
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None
