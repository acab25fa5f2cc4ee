"""Count the multiply-accumulates and the parameters of a model."""

import torch
from torch import Tensor, nn

from tresnet.layers.blur_pool import BlurPool2d
from tresnet.models.tresnet import TResNet
from tresnet.models.zoo import build


def output_sizes(model: TResNet, height: int, width: int) -> dict[str, tuple[int, ...]]:
    """Return (height, width) of each module's output by module name, for images of one size.

    `model` may be on the meta device. To run it there, PyTorch would load its compiler, which takes
    a second. Therefore a model of the same variant with fewer channels runs on the CPU instead.
    """
    thin = build(model.config.variant, width_factor=1 / 8, num_classes=1).eval()
    sizes: dict[str, tuple[int, ...]] = {}
    for name, module in thin.named_modules():

        def store_size(_: nn.Module, __: object, output: Tensor, name: str = name) -> None:
            sizes[name] = tuple(output.shape[2:])

        module.register_forward_hook(store_size)
    with torch.no_grad():
        thin(torch.zeros(1, thin.in_chans, height, width))
    return sizes


def count_macs(model: TResNet, sizes: dict[str, tuple[int, ...]]) -> int:
    """Return multiply-accumulates of convolutions, blurs and linear layers for one image.

    The count is half of that of `torch.utils.flop_counter.FlopCounterMode`. `sizes` is the result
    of `output_sizes`.
    """
    macs, channels = 0, 0
    for name, module in model.named_modules():
        weights = 0
        if isinstance(module, nn.Conv2d | nn.Linear):
            weights, channels = module.weight.numel(), len(module.weight)
        elif isinstance(module, BlurPool2d):  # 3x3 taps for each channel of the convolution before
            weights = 9 * channels
        if weights:
            macs += weights * torch.Size(sizes[name]).numel()
    return macs


def count_parameters(model: nn.Module) -> int:
    """Return the number of elements of all parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())
