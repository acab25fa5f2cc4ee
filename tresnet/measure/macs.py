"""Counts of a model's multiply-accumulates and parameters."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tresnet.layers.blur_pool import BlurPool2d
from tresnet.models.tresnet import TResNet

Sizes = dict[str, tuple[int, ...]]


def count_macs(model: TResNet, height: int, width: int) -> tuple[int, Sizes]:
    """Return multiply-accumulates for one image, and (height, width) of each module's output.

    Unlike this function, `torch.utils.flop_counter` counts two operations per multiply-accumulate,
    and the last layer of multi-label heads (less than 0.1 %). `model` may be on the meta device,
    where a run would take a second to load PyTorch's compiler. A model with the same configuration
    but fewer channels therefore runs on the CPU instead.
    """
    thin = TResNet(replace(model.config, width_factor=1 / 8, norm="abn")).eval()
    sizes: Sizes = {}
    macs = channels = 0
    for name, part in thin.named_modules():

        def store_size(_: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
            nonlocal macs
            if isinstance(output, torch.Tensor):
                sizes[name] = tuple(output.shape[2:] if output.dim() == 4 else output.shape[:-1])
            else:  # attention, including its projections, which are as wide as those of `model`
                queries, keys, dim = len(inputs[0]), len(inputs[1]), inputs[0].shape[-1]
                macs += 2 * dim * (dim * (queries + keys) + queries * keys)

        part.register_forward_hook(store_size)
    with torch.no_grad():
        thin(torch.zeros(1, thin.in_chans, height, width))
    for name, module in model.named_modules():
        weights = 0
        if isinstance(module, nn.Conv2d | nn.Linear) and name in sizes:
            weights, channels = module.weight.numel(), len(module.weight)
        elif isinstance(module, BlurPool2d):  # 3x3 taps per channel of the previous convolution
            weights = 9 * channels
        if weights:
            macs += weights * torch.Size(sizes[name]).numel()
    return macs, sizes


def count_parameters(model: nn.Module) -> int:
    """Return the number of elements of all parameters; tied parameters count once."""
    return sum(parameter.numel() for parameter in model.parameters())
