"""Fast global average pooling in plain PyTorch."""

from torch import Tensor


def global_avg_pool(x: Tensor, flatten: bool) -> Tensor:
    """Average each channel over all pixels with one `mean` (paper section 2.2.3).

    Args:
        x: (N, C, H, W), floating point.
        flatten: Return (N, C) instead of (N, C, 1, 1).

    Returns:
        (N, C) or (N, C, 1, 1) in the dtype of `x`.
    """
    return x.mean(dim=[2, 3], keepdim=not flatten)
