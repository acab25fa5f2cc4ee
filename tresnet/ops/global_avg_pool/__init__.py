"""Fast global average pooling."""

from torch import Tensor

from tresnet.ops.global_avg_pool import reference
from tresnet.ops.scripted import scripted_if


def global_avg_pool(x: Tensor, flatten: bool = True, *, jit: bool = False) -> Tensor:
    """Average each channel over all pixels, to (N, C) if `flatten`, otherwise to (N, C, 1, 1).

    `jit` runs the function compiled by TorchScript.
    """
    return scripted_if(jit, reference.global_avg_pool)(x, flatten)


__all__ = ["global_avg_pool"]
