"""Verdicts on Triton kernels: each kind is compared with its definition at its first use.

Triton compiles kernels on the user's machine, for its GPU, so tests elsewhere cannot prove them
right there. Each process compares on its own GPU, and keeps the verdicts in a dictionary.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from tresnet.errors import InputError

# Largest norm of the error of kernels, as a fraction of the norm of the expected values. The limit
# for 16 bits allows for several roundings: one of bfloat16 is about 1e-3.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-3}
# Texts of the errors of PyTorch's allocator, of Triton and of cuBLAS.
_SHORT_OF_MEMORY = "out of memory", "ALLOC_FAILED"
_verdicts: dict[Hashable, str | None] = {}
_lock = threading.RLock()  # a comparison changes flags of the whole process


def verdict(key: Hashable, device: torch.device, compare: Callable[[], None]) -> str | None:
    """Return the reason why kernels must not run on `device`, or None if they may.

    At the first call with this key, `compare` runs the kernels and raises an error if they are
    wrong. If the memory does not suffice for `compare`, or a CUDA graph is captured, the kernels
    may run. Raises `InputError` if a kernel has broken the process's CUDA context.
    """
    if key in _verdicts:
        return _verdicts[key]
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    with _lock:
        if key not in _verdicts:
            _verdicts[key] = _reason(device, compare)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # reserved memory stays that of the user's own steps
        return _verdicts[key]


def _reason(device: torch.device, compare: Callable[[], None]) -> str | None:
    try:
        with _undisturbed(device):
            compare()
    except Exception as error:  # compilers, linkers and drivers raise errors of any type
        if any(words in str(error) for words in _SHORT_OF_MEMORY):
            return None  # this says nothing about the kernels, and plain modules need more memory
        text = (str(error).strip() or "no message").splitlines()[-1]
        if _is_broken(device):
            raise InputError(
                f"a Triton kernel has broken this process's use of {device} ({text}): start "
                "the process again with impl='plain', or without the triton package"
            ) from error
        return f"its first use on {device} failed ({type(error).__name__}: {text})"
    return None


def _is_broken(device: torch.device) -> bool:
    """Return whether the CUDA context is unusable, as after an illegal address."""
    try:
        torch.ones(1, device=device).item()
    except torch.OutOfMemoryError:
        return False
    except RuntimeError:
        return True
    return False


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Context in which no mode, hook or generator of the user sees what runs.

    cuDNN's search for fast algorithms is off, because it would take longer than the comparison.
    PyTorch would keep the algorithms that are taken instead, for the user's convolutions of these
    shapes, unless they differ in being deterministic. PyTorch's own deterministic algorithms are
    off, because a definition has no such variant.
    """
    cudnn: Any = torch.backends.cudnn
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    before = cudnn.benchmark, cudnn.deterministic
    hooked = _top_saved_tensors_default_hooks(False) is not None
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        _disable_current_modes(),
        saved_tensors_hooks(lambda x: x, lambda x: x) if hooked else nullcontext(),
    ):
        torch.use_deterministic_algorithms(False)
        cudnn.benchmark, cudnn.deterministic = False, True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
            cudnn.benchmark, cudnn.deterministic = before


def check_near(name: str, result: Any, expected: Any, tolerance: float) -> None:
    """Raise `ArithmeticError` if the norm of the error is too large for that of `expected`.

    Tuples are compared part by part, and matrices row by row, because statistics differ in size.
    Only floats are compared. Where `expected` is None, only the kernels need a value. An error
    of the smallest number of the result's dtype is allowed everywhere.
    """
    if isinstance(expected, tuple):
        for part, expected_part in zip(result, expected, strict=True):
            check_near(name, part, expected_part, tolerance)
    elif expected is not None and expected.is_floating_point():
        if result is None:
            raise ArithmeticError(f"{name}: a result is missing")
        rows = (1,) if expected.dim() == 2 else None
        error, size = (torch.linalg.vector_norm(x, dim=rows) for x in (result - expected, expected))
        info = torch.finfo(result.dtype)
        smallest = info.smallest_normal * info.eps * (expected.numel() / size.numel()) ** 0.5
        allowed = tolerance * size + smallest
        if not (error <= allowed).all():  # NaN fails too
            raise ArithmeticError(
                f"{name}: off by {error.max():.3g}, expected at most {allowed.min():.3g}"
            )
