"""Squeeze and excitation (arXiv 1709.01507; section 2.5 of TResNet's paper)."""

import torch
from torch import Tensor, nn

from tresnet.layers.global_pool import GlobalPool2d


class SqueezeExcite(nn.Module):
    """Map x to x * sigmoid(fc2(relu(fc1(mean over H, W)))); fc1 and fc2 are 1x1 convolutions."""

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
        gate = self.pool(x)[:, :, None, None]
        return x * torch.sigmoid(self.fc2(torch.relu(self.fc1(gate))))
