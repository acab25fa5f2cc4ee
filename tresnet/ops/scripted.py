"""TorchScript forms of the helper functions, compiled at their first use.

Scripting at first use keeps `import tresnet` quick and construction free of side effects. The cache
is keyed by the function, so modules stay picklable: they hold a flag, never a `ScriptFunction`.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch


def scripted_if(jit: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the TorchScript form of `function` if `jit`, except under `torch.compile` and export.

    `function` is at module level and fully annotated.
    """
    return _scripted(function) if jit and not torch.compiler.is_compiling() else function


@functools.cache
def _scripted(function: Callable[..., Any]) -> Callable[..., Any]:
    with warnings.catch_warnings():
        # torch >= 2.15 announces that TorchScript is deprecated; `jit=True` asks for it knowingly.
        warnings.filterwarnings("ignore", message=r".*torch\.jit\.script.*")
        return torch.jit.script(function)
