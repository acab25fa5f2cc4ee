"""Calls that symbolic tracing records as one node, as their code reads shapes and dtypes."""

from typing import Any

from torch import Tensor, nn
from torch.fx import Proxy


def symbolic(x: Any) -> bool:
    """Return whether `x` stands for a tensor in a symbolic trace, without shape or dtype."""
    return isinstance(x, Proxy)


def record_call(module: nn.Module, x: Any, *args: Any) -> Tensor:
    """Record a call of `module` on the proxy `x`, for any tracer."""
    return x.tracer.create_proxy("call_module", x.tracer.path_of_module(module), (x, *args), {})
