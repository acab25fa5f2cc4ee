"""Count the multiply-accumulates and the parameters of a model."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tresnet.models.tresnet import TResNet


def count_macs(model: TResNet, height: int, width: int) -> int:
    """Return the multiply-accumulates of a model on the meta device for one image."""
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model.eval()(torch.empty(1, model.in_chans, height, width, device="meta"))
    return counter.get_total_flops() // 2


def count_parameters(model: nn.Module) -> int:
    """Return the number of elements of all parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())
