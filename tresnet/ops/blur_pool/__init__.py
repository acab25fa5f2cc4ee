"""Anti-aliased downsampling: 3x3 binomial blur with stride 2."""

import torch
from torch import Tensor

from tresnet.errors import InputError
from tresnet.ops.blur_pool import reference
from tresnet.ops.scripted import scripted_if


def blur_pool(x: Tensor, *, jit: bool = False) -> Tensor:
    """Blur with the 3x3 binomial filter, reflecting the border, and keep every second pixel.

    `x` (N, C, H, W) is floating point. The result is (N, C, ceil(H / 2), ceil(W / 2)).
    Raises `InputError` if H or W is 1, because the border cannot be reflected. With `jit`,
    TorchScript compiles the function.
    """
    if not torch.jit.is_tracing():
        check_shape(x)
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        return reference.blur_pool_by_slices(x)
    return scripted_if(jit, reference.blur_pool)(x)


def check_shape(x: Tensor) -> None:
    """Raise `InputError` unless `x` is (N, C, H, W) with H and W of at least 2."""
    if x.dim() != 4 or min(x.shape[-2:]) < 2:
        raise InputError(
            f"blur_pool expected (N, C, H, W) with H and W at least 2, got {tuple(x.shape)}: "
            "use larger images"
        )


__all__ = ["blur_pool", "check_shape"]
