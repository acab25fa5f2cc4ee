"""Choice between Triton kernels and plain PyTorch for an operation."""

import functools
import importlib.util
import os
import shutil
from contextvars import ContextVar

import torch

from tresnet.ops.tiles import interpreted

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAST_CAPABILITY = (8, 0)
# Compute capability of the GPU that fake tensors stand for.
fake_capability: ContextVar[tuple[int, int] | None] = ContextVar("fake_capability", default=None)


def traced() -> bool:
    """Return whether `torch.compile`, a tracer or `torch.func` records or transforms calls."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_dispatch_mode(_PROXY) is not None  # make_fx, which cannot record launches
        or torch._ops._get_dispatch_mode_pre_dispatch(_PROXY) is not None
    )


_PROXY = torch._C._TorchDispatchModeKey.PROXY


def obstacle(device: torch.device, dtype: torch.dtype, fake: bool = False) -> str | None:
    """Return the reason if Triton kernels cannot run on a device and dtype, or None if they can.

    `fake` says that the tensors are `FakeTensor`s. Their GPU has the capability in
    `fake_capability`; if that is None, the capability of this machine's GPU, or 8.0 without a GPU.
    On a machine without a GPU, fake tensors need no C compiler.
    """
    if dtype not in KERNEL_DTYPES:
        return f"computes float32, bfloat16 and float16, got {dtype}"
    if not _has_triton():
        return "needs the triton package, which is not installed"
    if device.type != "cuda":
        return None if interpreted() else f"needs a tensor on a GPU, got one on {device}"
    has_gpu = not fake or torch.cuda.is_available()
    capability = fake_capability.get() if fake else None
    capability = capability or (_capability(device.index or 0) if has_gpu else LEAST_CAPABILITY)
    if torch.version.hip is None and capability < LEAST_CAPABILITY:
        return "needs a GPU of compute capability 8.0 or later"
    if has_gpu and not _has_compiler():
        return "needs a C compiler for Triton's launcher (gcc or clang, or the variable CC)"
    return None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _has_compiler() -> bool:
    return bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
