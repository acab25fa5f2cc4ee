"""Choice between Triton kernels and plain PyTorch for an operation."""

import functools
import importlib.util
import os
import shutil
import warnings
from typing import get_args

import torch

from tresnet.errors import InputError
from tresnet.ops.tiles import interpreted
from tresnet.settings import Impl

IMPLS: tuple[Impl, ...] = get_args(Impl)
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAST_CAPABILITY = (8, 0)

_found: dict[int, str | None] = {}  # cache: the result of `lacking` for each index of a GPU


def check_impl(operation: str, impl: str) -> None:
    """Raise `InputError` if `impl` is not one of `IMPLS`."""
    if impl not in IMPLS:
        names = ", ".join(map(repr, IMPLS[:-1]))
        raise InputError(f"{operation} expected impl {names} or {IMPLS[-1]!r}, got {impl!r}")


def traced() -> bool:
    """Return whether `torch.compile`, a tracer or `torch.func` records or transforms operations."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_dispatch_mode(_PROXY) is not None  # make_fx, which cannot record launches
        or torch._ops._get_dispatch_mode_pre_dispatch(_PROXY) is not None
    )


_PROXY = torch._C._TorchDispatchModeKey.PROXY


def runs_kernels(device: torch.device, dtype: torch.dtype, impl: Impl, fake: bool = False) -> bool:
    """Return whether Triton kernels run for maps of this device and dtype.

    With "auto", kernels run if they support `dtype` and `lacking` returns None. With "reference",
    they never run. With "triton", `InputError` is raised if they cannot run. `fake` says that the
    maps are fake tensors.
    """
    if impl == "reference":
        return False
    obstacle = lacking(device, fake)
    if dtype not in KERNEL_DTYPES:
        obstacle = f"computes float32, bfloat16 and float16, got {dtype}"
    if impl == "triton" and obstacle is not None:
        raise InputError(f"impl='triton' {obstacle}: use impl='auto'")
    return obstacle is None


def lacking(device: torch.device, fake: bool = False) -> str | None:
    """Return why the kernels cannot run on a device or are wrong there; None if they are usable.

    With `fake`, no check runs, because fake tensors may represent a GPU of another machine.
    """
    index = device.index or 0
    if device.type == "cuda" and index in _found:
        return _found[index]
    reason = None if _has_triton() else "needs the triton package, which is not installed"
    if device.type != "cuda" and reason is None and not interpreted():
        reason = f"needs a tensor on a GPU, got one on {device}"
    if device.type != "cuda" or fake or not torch.cuda.is_available():
        return reason
    if reason is None and not _has_compiler():
        reason = "needs a C compiler for Triton's launcher (gcc or clang, or the variable CC)"
    elif reason is None and torch.version.hip is None and _capability(index) < LEAST_CAPABILITY:
        reason = "needs a GPU of compute capability 8.0 or later"
    if reason is not None:
        warnings.warn(f"{device} runs plain PyTorch: impl='triton' {reason}", stacklevel=4)
    elif torch.cuda.is_current_stream_capturing():
        return None
    else:
        from tresnet.ops import selfcheck  # imported only where a GPU is checked

        reason = selfcheck.failure(torch.device("cuda", index))
    _found[index] = reason
    return reason


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _has_compiler() -> bool:
    return bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))


def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
