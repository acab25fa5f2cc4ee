"""Implementation of `scaled_dot_product_attention` by the kernel that a GPU would run.

PyTorch's choice of the kernel depends on the GPU. Without a driver, PyTorch runs the math kernel,
which keeps the complete attention matrix. This file therefore chooses, by the rules for Ampere and
newer GPUs in PyTorch's `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`.
"""

import torch
import torch.nn.functional as F

aten = torch.ops.aten

# Largest head size that the flash kernel supports.
_FLASH_MAX_HEAD = 256


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute attention of q, k, v (N, heads, L, head size) by the kernel that a GPU would run."""
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        q, k, v = (t.to(dtype) for t in (q, k, v))
    if enable_gqa and k.shape[-3] != q.shape[-3]:
        repeats = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(repeats, -3), v.repeat_interleave(repeats, -3)
    takes_flash = q.dtype in (torch.float16, torch.bfloat16) and attn_mask is None
    sizes = {q.shape[-1], v.shape[-1]}
    if q.dim() == 4 and takes_flash and len(sizes) == 1 and max(sizes) <= _FLASH_MAX_HEAD:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        padding = -q.shape[-1] % 8  # the flash kernel takes head sizes divisible by 8
        padded = [F.pad(t, (0, padding)) if padding else t for t in (q, k, v)]
        out = aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, False, scale=scale
        )[0]
        return out[..., : q.shape[-1]] if padding else out
    aligned = all(size * q.itemsize % 16 == 0 for size in sizes)
    if q.dim() != 4 or not aligned or q.dtype == torch.float64:
        return aten._scaled_dot_product_attention_math(
            q, k, v, attn_mask, dropout_p, is_causal, None, scale=scale
        )[0]
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    mask = None if attn_mask is None else _as_bias(attn_mask, q, k)
    return aten._scaled_dot_product_efficient_attention(
        q, k, v, mask, needs_grad, dropout_p, is_causal, scale=scale
    )[0]


def _as_bias(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the mask as a bias of q's dtype; in memory, rows have a multiple of 16 elements."""
    if mask.dtype == torch.bool:
        bias = torch.zeros_like(mask, dtype=q.dtype)
        mask = bias.masked_fill_(mask.logical_not(), float("-inf"))
    mask = mask.to(q.dtype)
    length = mask.shape[-1]
    if length % 16:
        mask = F.pad(mask, (0, 16 - length % 16))[..., :length]
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
