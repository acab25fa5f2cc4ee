"""Squeeze and excitation."""

import torch
from torch import Tensor, nn

from tresnet.layers.global_pool import GlobalPool2d
from tresnet.ops import recompute
from tresnet.ops.abn import SEWeights


def _scale(x: Tensor, gate: Tensor) -> Tensor:
    return x * gate


class SqueezeExcite(nn.Module):
    """Global mean, 1x1, ReLU, 1x1, sigmoid, scale (arXiv 1709.01507; paper section 2.5)."""

    def __init__(
        self,
        channels: int,
        reduced: int,
        jit: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the two 1x1 convolutions.

        Args:
            channels: channels C of the input (N, C, H, W).
            reduced: channels between the two convolutions.
            jit: run the TorchScript form of the mean.
            device: where the parameters live.
            dtype: floating-point type of the parameters.
        """
        super().__init__()
        self.pool = GlobalPool2d(jit=jit)
        self.fc1 = nn.Conv2d(channels, reduced, 1, device=device, dtype=dtype)
        self.fc2 = nn.Conv2d(reduced, channels, 1, device=device, dtype=dtype)

    def weights(self) -> SEWeights:
        """The two convolutions as linear layers."""
        fc1, fc2 = self.fc1, self.fc2
        assert fc1.bias is not None
        assert fc2.bias is not None
        return SEWeights(fc1.weight.flatten(1), fc1.bias, fc2.weight.flatten(1), fc2.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Scale each channel of `x` (N, C, H, W) by a gate computed from all its pixels."""
        gate = self.pool(x)[:, :, None, None]
        gate = torch.sigmoid(self.fc2(torch.relu(self.fc1(gate))))
        y = _scale(x, gate)
        if not torch.jit.is_scripting():
            recompute.offer(y, _scale, x, gate)
        return y
