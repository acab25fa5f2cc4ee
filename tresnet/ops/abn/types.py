"""Tensors and settings of the operations between two convolutions.

`launch` and `reference` take them whole: a function reads the fields that it needs.
"""

from typing import Any, NamedTuple

from torch import Tensor


class SEWeights(NamedTuple):
    """Layers from C channels to R and back: weights (R, C) and (C, R), or with (1, 1) after."""

    fc1_weight: Tensor
    fc1_bias: Tensor
    fc2_weight: Tensor
    fc2_bias: Tensor


class Norm(NamedTuple):
    """Tensors and settings of a batch norm and of the operations after it.

    Attributes:
        gamma: (C,); None if the norm is folded into the convolution, whose bias is then `beta`.
        beta: (C,).
        mean: Running mean (C,), updated in place while training.
        var: Unbiased running variance (C,), updated likewise.
        momentum: Weight of the batch in the running statistics; None for no update.
        slope: Negative slope of the leaky ReLU; None for no activation.
        blur: Blur and keep every second pixel, as `blur_pool`.
        se: Layers of the squeeze and excitation that follows.
        group: Process group that synchronises the statistics. One of its processes may have a
            single value per channel, or an empty batch.
        channels: Number of channels to synchronise; further ones are padding. None for all.
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
    """Tensors of forward that backward reads.

    Attributes:
        y: (N, C, H, W), the convolution's output.
        stats: (4, C): mean, gamma * invstd, invstd, biased variance; None if the norm is folded.
        total: Values per channel over all processes; None for this process only.
        gate: (N, C), factors of the map.
        excited: (N, C), the gate of the SE, if `passed` changed it.
        passed: (N, 1), factors of the samples.
        squeezed: (N, C), input of the SE's layers.
        hidden: (N, R), their hidden layer.
        bits: Mask of the join's ReLU: bits by kernels, booleans by plain PyTorch.
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
        merged: (4, C): gradients of gamma and beta, and the factors of the second pass.
        squeeze_grad: (N, C), gradient of the squeeze over its pixels; None without a gate.
        written: The masked gradient of a join, else the layer's output, if requested.
        se: Gradients of the SE's layers.
    """

    merged: Tensor
    squeeze_grad: Tensor | None
    written: Tensor | None
    se: SEWeights | None
