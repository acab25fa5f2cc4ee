"""Helpers for autocast: the dtype in use, and a context that disables autocast."""

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast_off(device_type: str) -> AbstractContextManager[object]:
    """Return a context that disables autocast on `device_type`, or a no-op if autocast is off."""
    if autocast_dtype(device_type) is not None:
        return torch.autocast(device_type, enabled=False)
    return nullcontext()  # `torch.autocast` would take as long as a kernel launch


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype of autocast on `device_type`, or None if autocast is off."""
    # 'meta' is excluded by name: torch 2.11 cannot compile torch.amp.is_autocast_available
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def maps_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a convolution of `x` by `weight` computes."""
    own = weight.dtype
    return own if own == torch.float64 else autocast_dtype(x.device.type) or own
