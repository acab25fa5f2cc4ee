"""Multiply-accumulates and parameters of a model, counted on the meta device."""

import torch
from torch import nn


def count_macs(model: nn.Module, input_shape: tuple[int, int, int, int]) -> int:
    """Multiply-accumulates of one forward pass of the convolutions and matrix products.

    Half of what `torch.utils.flop_counter.FlopCounterMode` counts; pointwise work, pooling and
    normalisation are not in it. Nothing is computed: the model must be on the meta device.

    Args:
        model: a model whose parameters are on the meta device; run in eval mode and put back.
        input_shape: (N, C, H, W); the count is for the whole batch.
    """
    from torch.utils.flop_counter import FlopCounterMode

    was_training = model.training
    counter = FlopCounterMode(display=False)
    try:
        model.eval()
        with torch.no_grad(), counter:
            model(torch.empty(input_shape, device="meta"))
    finally:
        model.train(was_training)
    return counter.get_total_flops() // 2


def count_parameters(model: nn.Module) -> int:
    """Elements of all parameters, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
