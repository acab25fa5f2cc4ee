"""Record the operators that run."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Recorder(TorchDispatchMode):
    """Mode that records each call as (operator, arguments, keyword arguments, result)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    def names(self) -> list[str]:
        """Return names of operators, such as 'add' and '_foreach_add_'."""
        return [func._schema.name.removeprefix("aten::") for func, *_ in self.calls]
