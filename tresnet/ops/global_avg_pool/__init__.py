"""Fast global average pooling."""

from torch import Tensor

from tresnet.ops.global_avg_pool import reference
from tresnet.ops.scripted import scripted_if


def global_avg_pool(x: Tensor, flatten: bool = True, *, jit: bool = False) -> Tensor:
    """Average each channel over all pixels.

    Args:
        x: (N, C, H, W), floating point.
        flatten: return (N, C) instead of (N, C, 1, 1).
        jit: run the TorchScript form.

    Returns:
        (N, C) or (N, C, 1, 1) in the dtype of `x`.
    """
    return scripted_if(jit, reference.global_avg_pool)(x, flatten)


__all__ = ["global_avg_pool"]
