"""Modules that symbolic tracing takes as a whole: inside, shapes and dtypes decide what runs."""

from typing import Any

from torch import Tensor, nn
from torch.fx import Proxy


def symbolic(x: Any) -> bool:
    """Whether `x` stands for a tensor in a symbolic trace, and has neither shape nor dtype."""
    return isinstance(x, Proxy)


def record_call(module: nn.Module, x: Any, *args: Any) -> Tensor:
    """Record a call of `module` on `x`, whatever the tracer, where `symbolic(x)`."""
    return x.tracer.create_proxy("call_module", x.tracer.path_of_module(module), (x, *args), {})
