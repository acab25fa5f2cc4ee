"""Runner of a model's stem and stages, by fused kernels if possible, else as plain modules."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from tresnet.fused.blocks import FusedBlocks
from tresnet.fused.compare import describe
from tresnet.fused.read import UNFUSED_NORMS
from tresnet.fused.run import Group, UncheckedRunner
from tresnet.models.tresnet import Child
from tresnet.ops.dispatch import obstacle

_failures: dict[Any, str | None] = {}  # cache of `Runner.failure`: None if the kernels are right


class Runner(UncheckedRunner):
    """Callable that a TResNet holds as its attribute `runner`, to run the stem and the stages.

    With `impl` 'auto', fused Triton kernels run on a GPU that supports them, and otherwise plain
    PyTorch modules. With 'triton', `InputError` is raised where the kernels cannot run. With
    'plain', plain modules run. With `recompute` 'activations', backward recomputes the outputs of
    norms, blurs and SEs from the outputs of convolutions. With 'none', forward saves these outputs.
    """

    __slots__ = ()

    def failure(self, children: Sequence[Child], groups: Sequence[Group], x: Tensor) -> str | None:
        """Return the reason if the kernels fail their check, or None if they are right.

        The result is cached for the GPU of `x` and the blocks' settings, dtypes and shapes.
        """
        if isinstance(x, FakeTensor):
            return None
        all_fused = [group.fused for group in groups if group.fused is not None]
        key = (x.device, *map(_key, all_fused))
        if key not in _failures:
            if torch.cuda.is_current_stream_capturing():
                return None
            # not imported above: Python would warn of it in `python -m tresnet.fused.selfcheck`
            from tresnet.fused import selfcheck

            _failures[key] = selfcheck.failure(x.device, describe(children, x, all_fused[0].dtype))
        return _failures[key]


def _key(fused: FusedBlocks) -> tuple[Any, ...]:
    """Return what the kernels of `fused` depend on, apart from values."""
    dtypes = (getattr(tensor, "dtype", None) for tensor in fused.tensors)
    weights = (fused.tensors[index] for index in fused.weights)
    return fused.dtype, *fused.blocks, *dtypes, *(w.shape for w in weights)


def implementation(model: nn.Module, device: torch.device, dtype: torch.dtype) -> str:
    """Return 'Triton kernels', or 'plain modules' with the reason, for a device and dtype of maps.

    This function runs no model. If a module is unsupported, or the kernels fail their check when
    the model runs, 'auto' runs plain modules after all, with a warning.
    """
    runner = getattr(model, "runner", None)
    if not isinstance(runner, Runner) or runner.impl == "plain":
        return "plain modules"
    other = next((type(m).__name__ for m in model.modules() if type(m) in UNFUSED_NORMS), None)
    if other is not None:
        return f"plain modules, because the norms are {other}"
    if runner.impl == "auto" and device.type != "cuda":
        return f"plain modules, because impl='auto' runs no kernels on {device.type}"
    reason = obstacle(device, dtype)
    return "Triton kernels" if reason is None else f"plain modules, because impl='triton' {reason}"
