"""Arguments and results of `tresnet.ops.epilogue`: its tensors, those saved, and the gradients.

To add an operation with a parameter (C,), add a field to `Epilogue` before `se`. `tresnet.fused`
then reads its gradient from `FirstPass.grads` at the index of the field.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from tresnet.errors import InputError
from tresnet.ops.blur import check_shape


def check_batch(y: Tensor) -> None:
    """Raise `InputError` if batch statistics of `y` (N, C, H, W) would be of single values."""
    if y.numel() == y.shape[1]:
        raise InputError(
            f"batch statistics need more than one value per channel, got {tuple(y.shape)}: "
            "use a larger batch or image, or call model.eval()"
        )


class SEWeights(NamedTuple):
    """Parameters of an SE's two layers (C to R, R to C); weights are matrices or 1x1 filters."""

    fc1_weight: Any
    fc1_bias: Any
    fc2_weight: Any
    fc2_bias: Any


class Epilogue(NamedTuple):
    """Tensors and settings of the operations after a convolution; each one may be absent.

        y -- batch norm -- leaky ReLU -- blur --+-- * gate -- + shortcut -- ReLU -- output
                                                |      |
                                                +-- SE * stochastic depth

    In a `tresnet.fused.block_specs.Layer`, indices into a list take the place of tensors.

    Attributes:
        gamma: Scale (C,); None if the norm is folded into the convolution.
        beta: Shift (C,); the convolution's bias if the norm is folded.
        stats: For a norm in eval mode, four rows (4, C) in float32: mean, scale = gamma * invstd,
            invstd = 1 / sqrt(var + eps), and unbiased variance. None if the norm uses the
            statistics of the batch, or is folded.
        se: Layers of the squeeze and excitation; None without an SE.
        eps: Added to the batch variance.
        slope: Negative slope of the leaky ReLU; None without an activation.
        blur: Whether `blur_pool` halves the map after the activation.
    """

    gamma: Any
    beta: Any
    stats: Any = None
    se: SEWeights | None = None
    eps: float = 1e-5
    slope: float | None = None
    blur: bool = False

    @property
    def of_batch(self) -> bool:
        """Whether the norm uses the statistics of the batch."""
        return self.gamma is not None and self.stats is None

    def of_channels(self) -> tuple[Any, ...]:
        """Return gamma, beta and stats, each (..., C); gamma, stats or both may be None."""
        return self[:OF_CHANNELS]

    def tensors(self) -> tuple[Any, ...]:
        """Return all tensors in the order of the fields; gamma, stats or both may be None."""
        return (*self.of_channels(), *(self.se or ()))

    def map(self, function: Callable[[Any], Any]) -> "Epilogue":
        """Return an epilogue with `function(tensor)` in place of each tensor that is not None."""
        tensors = [None if part is None else function(part) for part in self.of_channels()]
        se = None if self.se is None else SEWeights(*map(function, self.se))
        return self._make((*tensors, se, *self[OF_CHANNELS + 1 :]))

    def check_map(self, y: Tensor) -> None:
        """Raise `InputError` if `y` is too small for a blur or for batch statistics."""
        if self.blur:
            check_shape(y)
        if self.of_batch:
            check_batch(y)


OF_CHANNELS = Epilogue._fields.index("se")  # number of fields whose last dimension is the channels


class Saved(NamedTuple):
    """Tensors that forward saves for backward; tensors of absent operations are None.

    Attributes:
        y: (N, C, H, W), the convolution's output.
        stats: (4, C), as in `Epilogue`; None if the norm is folded.
        gate: (N, C), the factor of each sample and channel: the sigmoid of the SE,
            `drop_path_scale`, or the product of both.
        se_gate: (N, C), the sigmoid of the SE if `gate` is the product; otherwise None.
        drop_path_scale: (N, 1), the factor of stochastic depth for each sample.
        squeezed: (N, C), input of the SE's first layer.
        hidden: (N, R), output of the SE's first layer after its ReLU.
        mask: 1 where the ReLU after the shortcut passes its input. Kernels write one bit for each
            value, as bytes (N, H * W, ceil(C / 8)). `definition` writes booleans with the shape of
            `y`.
    """

    y: Tensor
    stats: Tensor | None
    gate: Tensor | None = None
    se_gate: Tensor | None = None
    drop_path_scale: Tensor | None = None
    squeezed: Tensor | None = None
    hidden: Tensor | None = None
    mask: Tensor | None = None


class FirstPass(NamedTuple):
    """Results of the first pass of backward.

    Attributes:
        grads: Gradients of `Epilogue.tensors()`; None for the statistics and for absent tensors.
        masked_grad: The output's gradient where the ReLU passes, and 0 elsewhere; None without a
            shortcut.
        rebuilt: The recomputed output; None if not requested.
        norm_grads: (4, C): gradients of gamma and beta, then k1 and k0. With batch statistics, the
            second pass of the kernels adds k1 * (y - mean) + k0 to the gradient of y.
        squeeze_grad: (N, C), a pixel's gradient through the SE's mean; None without an SE.
    """

    grads: tuple[Tensor | None, ...]
    masked_grad: Tensor | None = None
    rebuilt: Tensor | None = None
    norm_grads: Tensor | None = None
    squeeze_grad: Tensor | None = None
