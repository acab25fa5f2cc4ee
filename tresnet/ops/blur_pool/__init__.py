"""Anti-aliased downsampling: 3x3 binomial blur with stride 2."""

import torch
from torch import Tensor

from tresnet.errors import InputError
from tresnet.ops import recompute
from tresnet.ops.blur_pool import reference
from tresnet.ops.blur_pool.autograd import BlurPool, transposed_blur_pool
from tresnet.ops.dispatch import Impl, check_impl, runs_kernels, transformed
from tresnet.ops.scripted import scripted_if


def blur_pool(x: Tensor, *, jit: bool = False, impl: Impl = "auto") -> Tensor:
    """Blur with the 3x3 binomial filter (reflected border) and keep every second pixel.

    Eager calls save nothing for backward. Under `torch.compile`, export, tracing and the transforms
    of `torch.func` the operation is plain PyTorch.

    Args:
        x: (N, C, H, W), floating point, H and W at least 2.
        jit: run the TorchScript form of the reference.
        impl: "reference" is plain PyTorch; "triton" one kernel with no padded copy; "auto" takes
            "triton" in eager mode on a GPU that has it, unless `jit`.

    Returns:
        (N, C, ceil(H / 2), ceil(W / 2)) in the dtype of `x`.

    Raises:
        InputError: an image is smaller than 2 x 2 pixels, so that its border cannot be reflected,
            or `impl` is unknown or cannot run here.
    """
    check_impl("blur_pool", impl)
    blur, transpose = scripted_if(jit, reference.blur_pool), transposed_blur_pool
    if torch.jit.is_tracing():
        return blur(x)
    if x.dim() != 4 or min(x.shape[-2:]) < 2:
        raise InputError(
            f"blur_pool expected (N, C, H, W) with H and W at least 2, got {tuple(x.shape)}: "
            "use larger images"
        )
    if runs_kernels(x, "reference" if jit and impl == "auto" else impl):
        from tresnet.ops.blur_pool import launch

        blur, transpose = launch.blur, launch.transposed_blur
    elif torch.compiler.is_exporting() or transformed():
        return blur(x)
    elif torch.compiler.is_compiling():
        return reference.blur_pool_by_slices(x)
    y: Tensor = BlurPool.apply(x, blur, transpose)  # pyright: ignore[reportAssignmentType]
    recompute.offer(y, blur, x)
    return y


__all__ = ["blur_pool"]
