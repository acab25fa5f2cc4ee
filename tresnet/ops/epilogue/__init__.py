"""The epilogue of a convolution: batch norm, activation, blur, SE and residual sum, by kernels.

For a convolution's output y, forward returns
relu(gate * blur(act(gamma * (y - mean) / sqrt(var + eps) + beta)) + shortcut). The gate is a factor
for each sample and channel, from SE (squeeze and excitation), stochastic depth or both. The
activation, the blur, the gate, and the shortcut with its ReLU are optional. In training, forward
reads y twice: for the statistics and for the output. For an SE after an activation or a blur, y is
read a third time. Forward saves y, small tensors such as the statistics, and a mask of the ReLU
with one bit for each value. Backward reads y twice, and once more if it recomputes the output
behind a blur. The first pass computes sums for BN and SE, and sets the gradient to 0 where the ReLU
was 0. The second pass writes the gradient of y.

`tresnet.fused` calls the functions of this module between convolutions, with those of
`tresnet.ops.pool`. The module `definition` has functions of the same names, which define them
in plain PyTorch.
"""

from torch import Tensor

from tresnet.ops.epilogue import passes
from tresnet.ops.epilogue.passes import gradient
from tresnet.ops.epilogue.types import Epilogue, FirstPass, Saved, SEWeights
from tresnet.ops.pool import add_avg_pool_grad, avg_pool


def forward(
    y: Tensor,
    epilogue: Epilogue,
    *,
    shortcut: Tensor | None = None,
    drop_path_scale: Tensor | None = None,
    saves: bool = False,
) -> tuple[Tensor, Saved]:
    """Run the operations after a convolution; return the output and tensors for backward.

    `y` (N, C, H, W) is a convolution's output, dense and not empty. `shortcut` is added before a
    ReLU; it has the shape of the output, and the dtype and memory format of `y`.
    `drop_path_scale` (N, 1) is a factor for each sample: 0 if stochastic depth drops the sample.
    With `saves`, the tensors for backward include the mask of the ReLU. Raises `InputError` for a
    blur of a map with H or W of 1, and if batch statistics would be of a single value per channel.
    """
    epilogue.check_map(y)
    stats, moments = epilogue.stats, None
    # without activation and blur, the moments of each chunk also give the SE's means
    linear = epilogue.of_batch and epilogue.se is not None
    linear = linear and epilogue.slope is None and not epilogue.blur
    merges = epilogue.se is None and drop_path_scale is None and not epilogue.blur
    merges = merges and y.shape[1] >= passes.MERGED_WIDTH
    if epilogue.of_batch:
        stats, moments = passes.statistics(y, epilogue, per_sample=linear, merges=merges)
    gate = se_gate = squeezed = hidden = None
    if epilogue.se is not None:
        saved = Saved(y, stats)
        alone = shortcut is None and drop_path_scale is None and not epilogue.blur
        reduced = epilogue.se.fc1_weight.shape[0]
        if alone and passes.fits_one_program(y.shape[1], y.shape[2:], reduced):
            return passes.excite_map(saved, epilogue)
        sums = moments if linear and moments else passes.squeeze(saved, epilogue)
        squeezed, hidden, gate = passes.excite(sums, saved, epilogue, linear=linear)
    if drop_path_scale is not None:
        se_gate = gate
        gate = drop_path_scale.expand(y.shape[:2]) if gate is None else gate * drop_path_scale
        gate = gate.contiguous()
    saved = Saved(y, stats, gate, se_gate, drop_path_scale, squeezed, hidden)
    needs_mask = saves and shortcut is not None
    moments = moments if merges else None
    out, mask = passes.apply(saved, epilogue, shortcut, needs_mask=needs_mask, moments=moments)
    return out, saved if mask is None else saved._replace(mask=mask)


def rebuild(epilogue: Epilogue, saved: Saved) -> Tensor:
    """Recompute and return the output of a `forward` that had no shortcut."""
    return passes.apply(saved, epilogue, None, needs_mask=False)[0]


def gradient_sums(
    grad: Tensor, second: Tensor | None, epilogue: Epilogue, saved: Saved, *, rebuilds: bool
) -> FirstPass:
    """Run the first pass of backward: compute sums for BN (arXiv 1502.03167, section 3) and SE.

    `grad` is the gradient of the output, with the dtype and memory format of `saved.y`. `second`
    is a gradient from a second consumer of the output, to be added; without a shortcut it is None.
    `rebuilds` requests the recomputed output, for a norm without blur and shortcut.
    """
    assert second is None or saved.mask is not None, "the second pass reads only `grad`"
    sums, masked_grad, rebuilt = passes.grad_sums(grad, second, saved, epilogue, rebuilds=rebuilds)
    squeeze_grad, of_se = None, ()
    if epilogue.se is None:
        norm_grads = passes.merge_grad_sums(sums, saved)
    else:
        squeeze_grad, of_se, norm_grads = passes.excite_grads(sums, saved, epilogue)
    grads = norm_grads.select(0, 0), norm_grads.select(0, 1), None, *of_se
    return FirstPass(grads, masked_grad, rebuilt, norm_grads, squeeze_grad)


__all__ = [
    "Epilogue", "FirstPass", "SEWeights", "Saved", "add_avg_pool_grad", "avg_pool", "forward",
    "gradient", "gradient_sums", "rebuild",
]  # fmt: skip
