"""Module that moves blocks of pixels into the channels."""

import torch
from torch import Tensor, nn

from tresnet.layers.symbolic import record_call, symbolic
from tresnet.ops import stem


class SpaceToDepth(nn.Module):
    """Space-to-depth, (N, C, H, W) to (N, b*b*C, H/b, W/b): b x b pixels become channels."""

    def __init__(self, block_size: int, jit: bool) -> None:
        super().__init__()
        self.block_size = block_size
        self.jit = jit

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return stem.blocks_to_channels(x, self.block_size)
        if symbolic(x):
            return record_call(self, x)
        return stem.space_to_depth(x, self.block_size, jit=self.jit)
