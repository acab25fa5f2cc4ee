"""Functions compiled by TorchScript at their first use.

So `import tresnet` is quick, and the construction of a module has no side effects. Compiled
functions are cached here, and modules hold only a flag, so that modules can be pickled.
"""

import functools
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)


def scripted_if(jit: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, compiled by TorchScript if `jit`.

    `function` must be annotated and at module level. `torch.compile` gets it without TorchScript.
    """
    return _scripted(function) if jit and not torch.compiler.is_compiling() else function


@functools.cache
def _scripted(function: Callable[..., Any]) -> Callable[..., Any]:
    _warn()
    with warnings.catch_warnings():
        # torch warns that TorchScript is deprecated; callers with `jit=True` still want it.
        warnings.filterwarnings("ignore", message=r".*torch\.jit\.script.*")
        return torch.jit.script(function)


@functools.cache
def _warn() -> None:
    if sys.version_info >= (3, 14):
        logger.warning(
            "jit=True: PyTorch does not support TorchScript on Python 3.14 and newer, where it may "
            "break: take torch.compile or torch.export"
        )
