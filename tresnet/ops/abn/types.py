"""Tensors and settings of the operations between two convolutions.

The functions of `launch` and `reference` take these tuples, and read the fields that they need.
"""

from typing import Any, NamedTuple

from torch import Tensor


class SEWeights(NamedTuple):
    """Layers of an SE: fc1 maps C channels to R, fc2 maps R to C. Weights may be 1x1 filters."""

    fc1_weight: Tensor
    fc1_bias: Tensor
    fc2_weight: Tensor
    fc2_bias: Tensor


class Norm(NamedTuple):
    """Tensors and settings of a batch norm and of the operations after it.

    Attributes:
        gamma: Scale (C,); None if the norm is folded into the convolution.
        beta: Shift (C,); the convolution's bias if the norm is folded.
        mean: Running mean (C,), updated in place in training; None if the norm is folded.
        var: Unbiased running variance (C,), updated in place in training; None if folded.
        momentum: Weight of the batch in the running statistics; None for no update.
        slope: Negative slope of the leaky ReLU; None for no activation.
        blur: Whether `blur_pool` halves the map after the activation.
        se: Layers of the squeeze and excitation; None for no SE.
        group: Process group that synchronises batch statistics; None for statistics of one process.
            A process of the group may have one value per channel, or an empty batch.
        channels: Number of channels before padding; None for an unpadded norm.
    """

    gamma: Tensor | None
    beta: Tensor
    mean: Tensor | None = None
    var: Tensor | None = None
    training: bool = False
    momentum: float | None = None
    eps: float = 1e-5
    slope: float | None = None
    blur: bool = False
    se: SEWeights | None = None
    group: Any = None
    channels: int | None = None

    def vectors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return `gamma`, `mean` and `var` of a norm that is not folded."""
        assert self.gamma is not None
        assert self.mean is not None
        assert self.var is not None
        return self.gamma, self.mean, self.var


class Kept(NamedTuple):
    """Tensors of forward that backward reads; those that a norm does not need are None.

    Attributes:
        y: (N, C, H, W), the convolution's output.
        stats: (4, C): mean, gamma * invstd, invstd and variance; None if the norm is folded.
        total: Number of values per channel over all processes; None if not synchronised.
        gate: (N, C), a factor for each map: the SE's gate, `passed`, or their product.
        excited: (N, C), the SE's gate if `gate` is the product; otherwise None.
        passed: (N, 1), the factor of stochastic depth for each sample.
        squeezed: (N, C), input of the SE's first layer.
        hidden: (N, R), output of the SE's first layer after its ReLU.
        bits: Mask of the ReLU after the shortcut: bits from kernels, booleans from plain PyTorch.
    """

    y: Tensor
    stats: Tensor | None
    total: Tensor | None = None
    gate: Tensor | None = None
    excited: Tensor | None = None
    passed: Tensor | None = None
    squeezed: Tensor | None = None
    hidden: Tensor | None = None
    bits: Tensor | None = None


class Sums(NamedTuple):
    """Results of the first pass of backward.

    Attributes:
        merged: (4, C): gradients of gamma and beta, then two factors, k1 and k0. In training, the
            second pass adds k1 * (y - mean) + k0 to the gradient of y.
        squeeze_grad: (N, C), a pixel's gradient through the SE's mean; 0 if there is a `Kept.gate`
            but no SE, and None if there is no `Kept.gate`.
        written: With a shortcut, the gradient masked by the ReLU. Without a shortcut, the
            recomputed output if `rebuilds`, otherwise None.
        se: Gradients of the SE's weights and biases.
    """

    merged: Tensor
    squeeze_grad: Tensor | None
    written: Tensor | None
    se: SEWeights | None
