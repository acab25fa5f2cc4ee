"""Multiply-accumulates and parameters of a model, counted without computing anything."""

import contextlib

import torch
from torch import nn


def without_computing() -> contextlib.AbstractContextManager[object]:
    """Return a context in which new tensors have shapes and devices but no data.

    It uses fake tensors rather than the meta device, as code that reads a tensor's device
    (autocast, for example) then works.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def count_macs(model: nn.Module, input_shape: tuple[int, int, int, int]) -> int:
    """Return multiply-accumulates of convolutions and matrix products in one forward pass.

    This is half of `torch.utils.flop_counter.FlopCounterMode`, for a batch of `input_shape` (N, C,
    H, W) in eval mode; pointwise operations, pooling and normalisation are not counted. Call it,
    and build the model, inside `without_computing`.
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
    """Return the number of elements of all parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())
