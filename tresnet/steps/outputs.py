"""Read a model's outputs: all metrics, tables and predictions take their figures from here.

Outputs that are not finite have no likeliest class. So they are counted by `finite` before anything
else reads them, and `not_finite` is their error. A prediction is made once, by `ranked` or
`present`, because different functions of PyTorch choose different classes of equal logits.
"""

from torch import Tensor

from tresnet.errors import OutputError
from tresnet.settings import Compute, InferenceCompute


def finite(logits: Tensor) -> Tensor:
    """Return whether all logits (N, classes) of an image are finite: (N,), bool."""
    return logits.isfinite().all(1)


def ranked(logits: Tensor, count: int) -> Tensor:
    """Return the indices (N, count) of the likeliest classes; the first of equal logits leads."""
    return logits.sort(dim=1, descending=True, stable=True).indices[:, :count]


def present(logits: Tensor, threshold: float) -> Tensor:
    """Return the predicted labels (N, classes), bool: those of a probability from `threshold`."""
    return logits.sigmoid() >= threshold


def not_finite(count: int, images: int, compute: Compute | None) -> OutputError:
    """Return the error for `count` of `images` images; `compute` is None for exported files."""
    amp, dtype = "off" if compute is None else compute.amp, "fp32"
    if isinstance(compute, InferenceCompute):
        dtype = compute.dtype
    advice = "take other weights, such as an earlier checkpoint"
    for option, value, wide in (("--amp", amp, "off"), ("--dtype", dtype, "fp32")):
        if value in ("fp16", "bf16"):
            dtype, advice = value, f"choose {option} {wide}{', or bf16' * (value == 'fp16')}"
    return OutputError(
        f"expected finite outputs, got infinities or NaN for {count} of {images} images in {dtype}:"
        f" {advice}"
    )
