"""Tensors and settings of the operations between two convolutions.

The functions of `launch` and `reference` take these tuples, and read the fields that they need.
"""

from typing import NamedTuple

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
        stats: (4, C) in float32: mean, gamma * invstd, invstd = 1 / sqrt(var + eps) and unbiased
            variance, of a norm in eval mode. None for batch statistics, or if the norm is folded.
        eps: Added to the batch variance.
        slope: Negative slope of the leaky ReLU; None for no activation.
        blur: Whether `blur_pool` halves the map after the activation.
        se: Layers of the squeeze and excitation; None for no SE.
    """

    gamma: Tensor | None
    beta: Tensor
    stats: Tensor | None = None
    eps: float = 1e-5
    slope: float | None = None
    blur: bool = False
    se: SEWeights | None = None

    @property
    def of_batch(self) -> bool:
        """Whether the norm uses the statistics of the batch."""
        return self.gamma is not None and self.stats is None


class Saved(NamedTuple):
    """Tensors of forward that backward reads; those that a norm does not need are None.

    Attributes:
        y: (N, C, H, W), the convolution's output.
        stats: (4, C), as in `Norm`; None if the norm is folded.
        gate: (N, C), a factor for each map: the SE's gate, `drop_path_scale`, or their product.
        excited: (N, C), the SE's gate if `gate` is the product; otherwise None.
        drop_path_scale: (N, 1), the factor of stochastic depth for each sample.
        squeezed: (N, C), input of the SE's first layer.
        hidden: (N, R), output of the SE's first layer after its ReLU.
        mask: Where the ReLU after the shortcut passes its input. From kernels, a byte holds the
            bits of 8 channels of a pixel, (N, H * W, ceil(C / 8)), or of 8 pixels of a channel,
            (N, C, 1, ceil(H * W / 8)). From plain PyTorch, booleans with the shape of `y`.
    """

    y: Tensor
    stats: Tensor | None
    gate: Tensor | None = None
    excited: Tensor | None = None
    drop_path_scale: Tensor | None = None
    squeezed: Tensor | None = None
    hidden: Tensor | None = None
    mask: Tensor | None = None


class Sums(NamedTuple):
    """Results of the first pass of backward.

    Attributes:
        factors: (4, C): gradients of gamma and beta, then k1 and k0. With batch statistics, the
            second pass adds k1 * (y - mean) + k0 to the gradient of y.
        squeeze_grad: (N, C), a pixel's gradient through the SE's mean; None without an SE.
        masked_grad: The output's gradient where the ReLU passes, and 0 elsewhere; None without a
            shortcut.
        rebuilt: The recomputed output; None if not requested.
        se: Gradients of the SE's weights and biases; None without an SE.
    """

    factors: Tensor
    squeeze_grad: Tensor | None
    masked_grad: Tensor | None
    rebuilt: Tensor | None
    se: SEWeights | None
