"""Helpers of the kernels' tests: their device, and uninitialised memory filled with NaN."""

import dataclasses
import types
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tresnet.ops import tiles
from tresnet.ops.epilogue import passes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # interpreted on a CPU


def _prepare_the_interpreter() -> None:
    """Patch Triton's language once, and for Triton 3.6 with a NumPy that is newer than it.

    Triton itself does so at every call of a function that kernels share, which takes ten times as
    long as what the function computes. Its release of torch 2.11 cannot loop with that NumPy. Types
    of NumPy are looked up in a table that it builds for each operation. Checks that sums and
    products of integers fit 32 bits take half of the time, and maps in tests are far smaller.
    """
    from triton.runtime import interpreter

    patch_language, patch_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor
    patched_modules: dict[int, Any] = {}
    get_dtype, dtypes = interpreter._get_np_dtype, dict[str, np.dtype]()

    def patched_language(function: Any) -> Any:
        module = function.__globals__
        if id(module) not in patched_modules:
            patch_language(function)
            patched_modules[id(module)] = module
        return types.SimpleNamespace(restore=lambda: None)

    def numpys(kind: Any) -> np.dtype:
        if kind.name not in dtypes:
            dtypes[kind.name] = get_dtype(kind)
        return dtypes[kind.name]

    def patched_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    execute = interpreter.GridExecutor.__call__

    def executed(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():  # which would see its copies of tensors
            execute(*args, **kwargs)

    interpreter.GridExecutor.__call__ = executed
    interpreter._get_np_dtype = numpys
    interpreter._patch_lang = patched_language
    interpreter._patch_lang_tensor = patched_tensor


if DEVICE == "cpu":
    _prepare_the_interpreter()
LAYOUTS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill what `torch.empty` returns with NaN: a value that a kernel forgets to write shows."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    tf32, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        with warnings.catch_warnings():
            # the plain operators' padding has no deterministic gradient on a GPU, nor may cuBLAS
            # have deterministic products, if CUDA began before its variable was set
            no_way = ".*(deterministic implementation|not deterministic because it uses CuBLAS).*"
            warnings.filterwarnings("ignore", message=no_way)
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = tf32
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs with large tiles: the interpreter's time goes by the number of operations."""
    if DEVICE == "cpu":
        monkeypatch.setattr(tiles, "_specs", {})
        for name in ("TILE", "BLUR_TILE"):
            monkeypatch.setattr(tiles, name, 1 << 16)
        monkeypatch.setattr(passes, "MERGE_CHANNELS", 64)
