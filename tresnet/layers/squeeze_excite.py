"""Squeeze and excitation."""

import torch
from torch import Tensor, nn

from tresnet.layers.global_pool import GlobalPool2d


class SqueezeExcite(nn.Module):
    """Global mean, 1x1, ReLU, 1x1, sigmoid, scale (arXiv 1709.01507; paper section 2.5)."""

    def __init__(
        self,
        channels: int,
        reduced: int,
        jit: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.pool = GlobalPool2d(jit=jit)
        self.fc1 = nn.Conv2d(channels, reduced, 1, device=device, dtype=dtype)
        self.fc2 = nn.Conv2d(reduced, channels, 1, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Scale each channel of `x` (N, C, H, W) by a gate computed from all its pixels."""
        gate = self.pool(x)[:, :, None, None]
        return x * torch.sigmoid(self.fc2(torch.relu(self.fc1(gate))))
