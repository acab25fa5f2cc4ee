"""Which implementation of an operation runs."""

import functools
import importlib.util
import os
import shutil
from typing import Literal, get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tresnet.errors import InputError
from tresnet.ops.tiles import interpreted

Impl = Literal["auto", "triton", "reference"]  # whose kernels an operation runs
IMPLS: tuple[Impl, ...] = get_args(Impl)
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAST_CAPABILITY = (8, 0)

_found: dict[int, str | None] = {}  # what each GPU was seen to lack: every operation asks


def check_impl(operation: str, impl: str) -> None:
    """Raise `InputError` if `impl` is not one of `IMPLS`."""
    if impl not in IMPLS:
        names = ", ".join(map(repr, IMPLS[:-1]))
        raise InputError(f"{operation} expected impl {names} or {IMPLS[-1]!r}, got {impl!r}")


def transformed() -> bool:
    """Whether a transform of `torch.func` is in force: they take plain operators alone."""
    return torch._C._are_functorch_transforms_active()


def traced() -> bool:
    """Whether operations are recorded or transformed: `torch.compile`, tracing, `torch.func`."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or transformed()


def runs_kernels(x: Tensor, impl: str, shared: bool = False) -> bool:
    """Whether an operation runs its Triton kernels on `x`.

    "auto" takes them on a GPU that has them in eager mode; under `torch.compile`, export and
    tracing the compiler fuses plain operators. "triton" takes them wherever they can be part of the
    graph, not under export, tracing and the transforms of `torch.func`. Other names never take
    them, nor does an empty batch, unless its statistics are `shared` with processes that wait.

    Raises:
        InputError: `impl` is "triton" and they cannot run; the message says why.
    """
    if not (shared or torch.jit.is_tracing()) and x.numel() == 0:
        return False
    if impl == "auto":
        return not traced() and x.is_cuda and _obstacle(x) is None
    if impl != "triton" or torch.jit.is_tracing() or transformed() or torch.compiler.is_exporting():
        return False
    obstacle = _obstacle(x)
    if obstacle is not None:
        raise InputError(f"impl='triton' {obstacle}: use impl='auto'")
    return True


def _obstacle(x: Tensor) -> str | None:
    """Why the kernels cannot run on `x`, None if they can."""
    if x.dtype not in KERNEL_DTYPES:
        return f"computes float32, bfloat16 and float16, got {x.dtype}"
    # The compiler cannot look at the machine; what is missing shows when the kernels are launched.
    return None if torch.compiler.is_compiling() else lacking(x.device, isinstance(x, FakeTensor))


def lacking(device: torch.device, fake: bool = False) -> str | None:
    """What is missing on a device for the kernels to run there, and be right.

    For fake tensors, which may stand for another GPU, nothing is tried on the one that is there.
    """
    index = device.index or 0
    if device.type == "cuda" and index in _found:
        return _found[index]
    if not _has_triton():
        return "needs the triton package, which is not installed"
    if device.type != "cuda":
        return None if interpreted() else f"needs a tensor on a GPU, got one on {device}"
    if fake or not torch.cuda.is_available():
        return None
    if not _has_compiler():
        reason = "needs a C compiler for Triton's launcher (gcc or clang, or the variable CC)"
    elif torch.version.hip is None and _capability(index) < LEAST_CAPABILITY:
        reason = "needs a GPU of compute capability 8.0 or later"
    elif torch.cuda.is_current_stream_capturing():
        return None
    else:
        from tresnet.ops import selfcheck  # which imports this

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
