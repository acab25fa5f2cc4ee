"""Batch norm, activation, blur, SE and residual sum, forward and backward, by Triton kernels.

For a convolution's output y, forward returns
relu(gate * blur(act(gamma * (y - mean) / sqrt(var + eps) + beta)) + shortcut). The gate is a factor
for each sample and channel, from SE (squeeze and excitation), stochastic depth or both. The
activation, the blur, the gate, and the shortcut with its ReLU are optional. In training, forward
reads y twice: for the statistics and for the output. For an SE after an activation or a blur, y is
read a third time. Forward saves y, small tensors such as the statistics, and a mask of the ReLU
with one bit for each value. Backward reads y twice. The first pass computes sums for BN and SE, and
sets the gradient to 0 where the ReLU was 0. The second pass writes the gradient of y.

`tresnet.fused` calls the functions of this module between convolutions, with those of
`tresnet.ops.avg_pool`. The module `reference` has functions of the same names, which define them in
plain PyTorch.
"""

from torch import Tensor

from tresnet.ops.abn import launch
from tresnet.ops.abn.types import Norm, Saved, SEWeights, Sums
from tresnet.ops.avg_pool import add_avg_pool_grad, avg_pool


def forward(
    y: Tensor,
    norm: Norm,
    *,
    shortcut: Tensor | None = None,
    drop_path_scale: Tensor | None = None,
    saves: bool = False,
) -> tuple[Tensor, Saved]:
    """Run a batch norm and the operations after it; return the output and tensors for backward.

    `y` (N, C, H, W) is a convolution's output, dense and not empty. `shortcut` is added before a
    ReLU; it has the shape of the output, and the dtype and memory format of `y`.
    `drop_path_scale` (N, 1) is a factor for each sample: 0 if stochastic depth drops the sample.
    With `saves`, the tensors for backward include the mask of the ReLU. Raises `InputError` for a
    blur of a map with H or W of 1, and if batch statistics would be of a single value per channel.
    """
    norm.check_map(y)
    stats, sums = norm.stats, None
    linear = norm.of_batch and norm.se is not None and norm.slope is None and not norm.blur
    if norm.of_batch:
        stats, sums = launch.statistics(y, norm, per_sample=linear)
    gate = se_gate = squeezed = hidden = None
    if norm.se is not None:
        saved = Saved(y, stats)
        if sums is None:  # the statistics do not give the SE's means, so `y` is read again
            sums = launch.squeeze(saved, norm)
        squeezed, hidden, gate = launch.excite(sums, saved, norm, linear=linear)
    if drop_path_scale is not None:
        se_gate = gate
        gate = drop_path_scale.expand(y.shape[:2]) if gate is None else gate * drop_path_scale
        gate = gate.contiguous()
    saved = Saved(y, stats, gate, se_gate, drop_path_scale, squeezed, hidden)
    needs_mask = saves and shortcut is not None
    out, mask = launch.apply(saved, norm, shortcut, needs_mask=needs_mask)
    return out, saved if mask is None else saved._replace(mask=mask)


def rebuild(norm: Norm, saved: Saved) -> Tensor:
    """Recompute and return the output of a `forward` that had no shortcut."""
    return launch.apply(saved, norm, None, needs_mask=False)[0]


def gradient_sums(
    grad: Tensor, second: Tensor | None, norm: Norm, saved: Saved, *, rebuilds: bool
) -> Sums:
    """Run the first pass of backward: compute sums for BN (arXiv 1502.03167, section 3) and SE.

    `grad` is the gradient of the output, with the dtype and memory format of `saved.y`. `second`
    is a gradient from a second consumer of the output, to be added; without a shortcut it is None.
    `rebuilds` requests the recomputed output, for a norm without blur and shortcut.
    """
    assert second is None or saved.mask is not None, "the second pass reads only `grad`"
    sums, masked_grad, rebuilt = launch.grad_sums(grad, second, saved, norm, rebuilds=rebuilds)
    squeeze_grad, of_se = None, ()
    if norm.se is None:
        norm_grads = launch.merge_grad_sums(sums, saved)
    else:
        squeeze_grad, of_se, norm_grads = launch.excite_grads(sums, saved, norm)
    grads = norm_grads.select(0, 0), norm_grads.select(0, 1), None, *of_se
    return Sums(grads, masked_grad, rebuilt, norm_grads, squeeze_grad)


def gradient(grad: Tensor, norm: Norm, saved: Saved, sums: Sums) -> Tensor:
    """Run the second pass of backward: return the gradient of `saved.y`.

    `grad` is the gradient of the output, or `sums.masked_grad` if forward added a shortcut.
    """
    return launch.grad_apply(grad, saved, norm, sums)


__all__ = [
    "Norm", "SEWeights", "Saved", "Sums", "add_avg_pool_grad", "avg_pool", "forward", "gradient",
    "gradient_sums", "rebuild",
]  # fmt: skip
