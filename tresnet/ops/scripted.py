"""Functions compiled by TorchScript at their first use.

So `import tresnet` is quick, and the construction of a module has no side effects. Compiled
functions are cached here, and modules hold only a flag, so that modules can be pickled.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch


def scripted_if(jit: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, compiled by TorchScript if `jit`.

    `function` must be annotated and at module level. `torch.compile` gets it without TorchScript.
    """
    return _scripted(function) if jit and not torch.compiler.is_compiling() else function


@functools.cache
def _scripted(function: Callable[..., Any]) -> Callable[..., Any]:
    with warnings.catch_warnings():
        # torch warns that TorchScript is deprecated; callers with `jit=True` still want it.
        warnings.filterwarnings("ignore", message=r".*torch\.jit\.script.*")
        return torch.jit.script(function)
