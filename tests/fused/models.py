"""Small models on the fused kernels, and the plain models that they are compared with."""

import copy

import torch
from torch import nn

from tests.ops.kernels import DEVICE
from tests.toys import smallest
from tresnet.fused import Runner
from tresnet.ops.epilogue import definition

# Base widths 19 and 21, as tresnet_l's and tresnet_xl's 76 and 83: the one is a multiple of 8 from
# the third stage's outputs on, the other from the fourth stage on.
PADDED = {
    "l": {"name": "tresnet_l", "layers": (1, 2, 1, 1), "width_factor": 0.3},
    "xl": {"name": "tresnet_xl", "layers": (1, 1, 2, 1), "width_factor": 0.33},
}


class Definitions(Runner):
    """Runs fused blocks by the definitions in place of kernels, in any floating-point dtype."""

    def ops(self, x, weight):
        return Runner("triton").ops(x.float(), weight.float()) and definition


class AsOnGpu(Runner):
    """Runs kernels in place of plain modules with `impl` 'auto' too, as on a GPU."""

    def ops(self, x, weight):
        return Runner("triton").ops(x, weight)


RUNNERS = {
    "triton": Runner("triton"),
    "definitions": Definitions("triton"),
    "fallback": Definitions(),  # plain modules, with a warning, for what `read` refuses
    "auto": Runner(),
    "as on a GPU": AsOnGpu(),
    "plain": None,
}


def make(impl="triton", recompute="activations", name="tresnet_t", **options):
    """Build a model with one block per stage and random norms, of which none is zero."""
    torch.manual_seed(0)
    model = smallest(name, **{"num_classes": 5, **options})
    for module in model.modules():
        if hasattr(module, "running_mean"):
            nn.init.normal_(module.weight, 1, 0.2)
            nn.init.normal_(module.bias, 0, 0.2)
            nn.init.normal_(module.running_mean, 0, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 2)
    for parameter in model.body.parameters():
        if parameter.dim() == 1 and not parameter.any():
            nn.init.normal_(parameter, 0, 0.2)
    runner = RUNNERS[impl]
    model.runner = runner and runner._replace(recompute=recompute)
    return model.to(DEVICE)


def plain(model):
    """A copy in float64 of plain modules."""
    copied = copy.deepcopy(model).double()
    copied.runner = None
    return copied


def images(dtype=torch.float32, batch=2, side=40):
    """Images in channels_last memory, whose maps have odd sizes from the second stage on."""
    torch.manual_seed(1)
    x = torch.rand(batch, 3, side, side + 8).to(DEVICE, dtype)
    return x.to(memory_format=torch.channels_last)


def assert_near(ours, exact, tolerance):
    """Check that nothing is further off than this fraction of its norm."""
    assert ours.keys() == exact.keys()
    for name, value in exact.items():
        error = (ours[name].double() - value).norm() / value.double().norm().clamp(min=1e-30)
        assert error <= tolerance, f"{name} is off by {error:.1e}"
