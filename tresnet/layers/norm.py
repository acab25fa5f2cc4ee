"""Batch norm with its activation: three classes with equal outputs.

Each class has the parameters and buffers of `torch.nn.BatchNorm2d`; `weight` is gamma. For
backward, `NormAct` saves two feature maps, and `InplaceABN` saves one. `ABN` saves one if
Triton kernels run with recompute='activations' (see `tresnet.fused.Runner`), and otherwise two.
"""

import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tresnet.errors import InputError, MissingDependencyError, check_known
from tresnet.layers.symbolic import record_call, symbolic
from tresnet.ops.dispatch import traced
from tresnet.ops.epilogue.types import check_batch

_frozen = threading.local()


class FrozenRunningStats:
    """Context that keeps running statistics unchanged while checkpointing repeats a forward.

    The context can be entered again, because each backward with `retain_graph` repeats the forward.
    """

    def __enter__(self) -> None:
        _frozen.depth = getattr(_frozen, "depth", 0) + 1

    def __exit__(self, *error: object) -> None:
        _frozen.depth -= 1


def running_stats_frozen() -> bool:
    """Return whether this thread is inside a `FrozenRunningStats` context."""
    return getattr(_frozen, "depth", 0) > 0


class NormAct(nn.BatchNorm2d):
    """Batch norm and leaky ReLU in plain PyTorch, 'batchnorm'; base class of the other two.

    `slope` is the negative slope of the leaky ReLU, or None for no activation. `momentum` is the
    weight of a batch in the running statistics; if None, all batches have equal weights. Tools that
    replace batch norms find this class, because it is a subclass of `nn.BatchNorm2d`. After such a
    replacement, `ConvNormAct` applies the activation.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor  # pyright: ignore[reportIncompatibleVariableOverride]
    running_var: Tensor  # pyright: ignore[reportIncompatibleVariableOverride]
    num_batches_tracked: Tensor  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        num_features: int,
        slope: float | None = 1e-2,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, device=device, dtype=dtype)
        self.slope = slope

    def zero_init(self) -> None:
        """Set gamma to 0: a residual block then starts as the identity (arXiv 1706.02677, 5.1)."""
        nn.init.zeros_(self.weight)

    def _count_batch(self) -> float:
        self.num_batches_tracked.add_(1)
        if self.momentum is None:
            return 1.0 / float(self.num_batches_tracked)
        return self.momentum

    def _statistics(self, frozen: bool) -> tuple[Tensor | None, Tensor | None, float]:
        """Return running mean, variance and momentum; copies if training must not change them.

        Checkpointing counts the tensors that autograd saves, so there are as many if `frozen`.
        """
        mean, var = self.running_mean, self.running_var
        if not self.training or mean is None:
            return mean, var, 0.0
        if frozen or not self.track_running_stats:
            return mean.clone(), var.clone(), 0.0
        return mean, var, self._count_batch()

    def _gamma(self) -> Tensor:
        return self.weight

    def _plain(self, x: Tensor, frozen: bool = False) -> Tensor:
        mean, var, momentum = self._statistics(frozen)
        training = self.training or mean is None
        y = F.batch_norm(x, mean, var, self._gamma(), self.bias, training, momentum, self.eps)
        if self.slope is None:
            return y
        # a slope below 0 forbids to work in place: the output would not tell the input's sign
        return F.leaky_relu(y, self.slope, inplace=self.slope >= 0)

    @torch.jit.unused
    def _run(self, x: Tensor) -> Tensor:
        if self.training and not traced():
            check_batch(x)
        return self._plain(x, running_stats_frozen())

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Normalise and activate `x` (N, C, H, W); the result has the shape and dtype of `x`."""
        if torch.jit.is_scripting():
            return self._plain(x)
        if symbolic(x):
            return record_call(self, x)
        return self._run(x)

    def extra_repr(self) -> str:
        return f"{self.num_features}, slope={self.slope}, eps={self.eps}, momentum={self.momentum}"


class ABN(NormAct):
    """Batch norm and leaky ReLU; on a GPU, Triton kernels of `tresnet.fused` can compute both."""


class InplaceABN(NormAct):
    """Batch norm and leaky ReLU by the inplace-abn package, which overwrites its input.

    The package computes gamma = |w| + eps from its weight w. Here `weight` is gamma, and w is
    `weight` - eps. If an optimizer step makes w negative, the next forward in training (or
    `state_dict()`) sets `weight` to |w| + eps. A gamma below eps cannot be represented.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create the parameters, or raise `MissingDependencyError` without inplace-abn."""
        super().__init__(*args, **kwargs)
        inplace_abn_function()
        self.register_state_dict_pre_hook(_reflect)

    def zero_init(self) -> None:
        """Set gamma to eps, the smallest value that inplace-abn can represent."""
        nn.init.constant_(self.weight, self.eps)

    def _gamma(self) -> Tensor:
        return torch.maximum(self.weight, 2 * self.eps - self.weight)

    @torch.jit.unused
    def _run(self, x: Tensor) -> Tensor:
        if torch.jit.is_tracing() or torch.compiler.is_exporting() or self.running_mean is None:
            return self._plain(x)
        if self.training:
            _reflect(self)
        if x.dtype.itemsize == 2 and (x.dtype == torch.bfloat16 or not x.is_cuda):
            missing, other = ("bfloat16", "float16") if x.is_cuda else ("16-bit", "float32")
            raise InputError(
                f"inplace-abn has no {missing} kernels for a {x.device.type} device: use {other}, "
                "or norm='abn'"
            )
        w, activation = self.weight - self.eps, "leaky_relu"
        slope = self.slope
        if slope is None:
            activation, slope = "identity", 0.01
        mean, var, momentum = self._statistics(running_stats_frozen())
        return inplace_abn_function()(
            x, w, self.bias, mean, var, self.training, momentum, self.eps, activation, slope
        )


def inplace_abn_function() -> Any:
    """Import the function of inplace-abn; raise `MissingDependencyError` if this fails."""
    try:
        from inplace_abn.functions import inplace_abn  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingDependencyError(
            "norm='inplace_abn' needs the inplace-abn package, which is not importable "
            f"({error}): pip install setuptools setuptools_scm wheel ninja && "
            "pip install --no-build-isolation --no-cache-dir inplace-abn==1.1.0, "
            "or use norm='abn', which needs neither compiler nor package"
        ) from error
    return inplace_abn


@torch.no_grad()
def _reflect(module: InplaceABN, *_: Any) -> None:
    """Replace each weight g < eps by 2 eps - g; both give the same gamma, |g - eps| + eps."""
    module.weight.copy_(module._gamma())


NORMS: dict[str, type[NormAct]] = {"abn": ABN, "batchnorm": NormAct, "inplace_abn": InplaceABN}
# Folding accepts these exact classes: a subclass might compute another function.
PLAIN_NORMS = (*NORMS.values(), nn.BatchNorm2d, nn.SyncBatchNorm)


def norm_class(name: str) -> type[NormAct]:
    """Return the norm class called `name`; raise `InputError` if there is none."""
    check_known("norm", name, NORMS)
    return NORMS[name]
