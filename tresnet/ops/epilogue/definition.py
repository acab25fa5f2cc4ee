"""Plain PyTorch definitions of the functions that `tresnet.ops.epilogue` documents.

The functions compute in float32, or in float64 for maps in float64. The backward of the batch norm
is PyTorch's `native_batch_norm_backward`, which reads the statistics of forward. Autograd
differentiates the other operations.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tresnet.ops.blur import blur_by_convolution
from tresnet.ops.epilogue.types import Epilogue, FirstPass, Saved, SEWeights
from tresnet.ops.pool import plain_add_avg_pool_grad as add_avg_pool_grad
from tresnet.ops.pool import plain_avg_pool as avg_pool


def forward(
    y: Tensor,
    epilogue: Epilogue,
    *,
    shortcut: Tensor | None = None,
    drop_path_scale: Tensor | None = None,
    saves: bool = False,
) -> tuple[Tensor, Saved]:
    """Run a batch norm and the operations after it; return output and tensors for backward."""
    epilogue.check_map(y)
    values, stats = _wide(y), epilogue.stats
    if epilogue.of_batch:
        var, mean = torch.var_mean(values, (0, 2, 3), correction=0)
        count = y.numel() // y.shape[1]
        invstd = torch.rsqrt(var + epilogue.eps)
        stats = torch.stack((mean, epilogue.gamma * invstd, invstd, var * (count / (count - 1))))
    saved = Saved(y, stats, drop_path_scale=drop_path_scale)
    out, saved = _after_norm(_normalised(saved, epilogue), epilogue, saved)
    out = (out if shortcut is None else torch.relu(out + shortcut)).to(y.dtype)
    return out, saved._replace(mask=~(out <= 0)) if saves and shortcut is not None else saved


def rebuild(epilogue: Epilogue, saved: Saved) -> Tensor:
    """Recompute and return the output of a `forward` that had no shortcut."""
    return _after_norm(_normalised(saved, epilogue), epilogue, saved)[0].to(saved.y.dtype)


def gradient_sums(
    grad: Tensor, second: Tensor | None, epilogue: Epilogue, saved: Saved, *, rebuilds: bool
) -> FirstPass:
    """Return `FirstPass` without what only the kernels read: norm_grads and squeeze_grad."""
    total, masked_grad = _wide(grad) if second is None else _wide(grad) + second, None
    if saved.mask is not None:
        total = total.masked_fill(~saved.mask, 0.0)
        masked_grad = total.to(grad.dtype)
    _, grads = _backward(total, epilogue, saved)
    return FirstPass(grads, masked_grad, rebuild(epilogue, saved) if rebuilds else None)


def gradient(grad: Tensor, epilogue: Epilogue, saved: Saved, sums: FirstPass) -> Tensor:
    """Return the gradient of `saved.y`."""
    return _backward(_wide(grad), epilogue, saved)[0].to(saved.y.dtype)


def _backward(
    grad: Tensor, epilogue: Epilogue, saved: Saved
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the gradients of `saved.y` and of `Epilogue.tensors()`."""
    assert saved.stats is not None
    with torch.enable_grad():
        z = _normalised(saved, epilogue).detach().requires_grad_()
        se = epilogue.se and SEWeights(*(part.detach().requires_grad_() for part in epilogue.se))
        out, _ = _after_norm(z, epilogue._replace(se=se), saved)
        grad_z, *of_se = torch.autograd.grad(out, [z, *(se or ())], grad)
    mean, _, invstd, var = saved.stats
    y = _wide(saved.y)
    grad_y, *of_norm = torch.ops.aten.native_batch_norm_backward(
        grad_z, y, epilogue.gamma.to(y.dtype), mean, var, mean, invstd, epilogue.of_batch,
        epilogue.eps, (True, True, True),
    )  # fmt: skip
    return grad_y, (*of_norm, None, *of_se)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _normalised(saved: Saved, epilogue: Epilogue) -> Tensor:
    z = _wide(saved.y)
    if saved.stats is not None:
        mean, scale, *_ = saved.stats[..., None, None]
        z = (z - mean) * scale
    return z + epilogue.beta.to(z.dtype)[:, None, None]


def _after_norm(z: Tensor, epilogue: Epilogue, saved: Saved) -> tuple[Tensor, Saved]:
    """Return the output without the shortcut, and a copy of `saved` with the SE gate's tensors."""
    a = z if epilogue.slope is None else F.leaky_relu(z, epilogue.slope)
    a = blur_by_convolution(a) if epilogue.blur else a
    gate = se_gate = None
    if epilogue.se is not None:
        fc1_weight, fc1_bias, fc2_weight, fc2_bias = (part.to(a.dtype) for part in epilogue.se)
        squeezed = a.mean((2, 3))
        hidden = F.linear(squeezed, fc1_weight.flatten(1), fc1_bias)
        # backward takes the ReLU's sign in forward, which rounding decides if the value is near 0
        sign = hidden if saved.hidden is None else saved.hidden
        hidden = hidden.masked_fill(sign <= 0, 0.0)
        gate = torch.sigmoid(F.linear(hidden, fc2_weight.flatten(1), fc2_bias))
        saved = saved._replace(squeezed=squeezed, hidden=hidden)
    if saved.drop_path_scale is not None:
        se_gate, scale = gate, saved.drop_path_scale.expand(z.shape[:2])
        gate = scale if gate is None else gate * scale
    out = a if gate is None else a * gate[:, :, None, None]
    return out, saved._replace(gate=gate, se_gate=se_gate)


__all__ = ["add_avg_pool_grad", "avg_pool", "forward", "gradient", "gradient_sums", "rebuild"]
