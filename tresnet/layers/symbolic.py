"""Helpers that record a module's call as one node of a `torch.fx` trace."""

from typing import Any

from torch import Tensor, nn
from torch.fx import Proxy


def symbolic(x: Any) -> bool:
    """Return whether `x` is a `torch.fx.Proxy`, whose shape and dtype are unknown."""
    return isinstance(x, Proxy)


def record_call(module: nn.Module, x: Any, *args: Any) -> Tensor:
    """Record a call of `module` with the proxy `x` and `args` as one node of the trace."""
    return x.tracer.create_proxy("call_module", x.tracer.path_of_module(module), (x, *args), {})
