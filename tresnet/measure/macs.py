"""Multiply-accumulates and parameters of a model, counted without computing anything."""

import contextlib

import torch
from torch import nn


def without_computing() -> contextlib.AbstractContextManager[object]:
    """Inside, new tensors have shapes and devices but no data: models cost no memory and no time.

    Fake tensors rather than the meta device, because code that asks for a tensor's device (for
    autocast, say) goes on working.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def count_macs(model: nn.Module, input_shape: tuple[int, int, int, int]) -> int:
    """Multiply-accumulates of one forward pass of the convolutions and matrix products.

    Half of what `torch.utils.flop_counter.FlopCounterMode` counts; pointwise work, pooling and
    normalisation are not in it. Call it, and build the model, inside `without_computing`.

    Args:
        model: run in eval mode and put back.
        input_shape: (N, C, H, W); the count is for the whole batch.
    """
    from torch.utils.flop_counter import FlopCounterMode

    was_training = model.training
    counter = FlopCounterMode(display=False)
    try:
        model.eval()
        with torch.no_grad(), counter:
            model(torch.empty(input_shape))
    finally:
        model.train(was_training)
    return counter.get_total_flops() // 2


def count_parameters(model: nn.Module) -> int:
    """Elements of all parameters, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
