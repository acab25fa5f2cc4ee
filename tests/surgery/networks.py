"""Small models with every kind of part, whose tensors all have values of their own."""

from importlib.util import find_spec

import pytest
import torch

from tests.checkpoints.small import trained
from tresnet.models.zoo import build

NEEDS_PACKAGE = pytest.mark.skipif(
    find_spec("inplace_abn") is None, reason="the inplace-abn package is not installed"
)
INPLACE = pytest.param("inplace_abn", marks=NEEDS_PACKAGE)
NORMS = ["abn", "batchnorm", INPLACE]
ODD_WIDTH = 0.3  # 19 channels, and 38, 76: not multiples of 8, as in L and XL


def network(name="tresnet_t", norm="abn", **options):
    """Build a model of 19 base channels in eval mode; version 2 rounds them to 16."""
    options = {"width_factor": ODD_WIDTH, "num_classes": 7, "layers": (1, 2, 1, 2)} | options
    model = trained(build(name, norm=norm, **options))
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "running_var"):
                module.weight.uniform_(0.5, 1.5)
                # gammas have either sign, or stand for their reflection at eps
                center = 2 * module.eps if norm == "inplace_abn" else 0.0
                module.weight[::3] = center - module.weight[::3]
    if norm == "inplace_abn":
        model.set_slopes(2**-7, 2**-10)  # the package takes them as float32
    return model.eval()


def images(dtype=torch.float32, batch=2, height=36, width=28):
    return torch.rand(batch, 3, height, width, dtype=dtype)


def features(model, x):
    return model.forward_intermediates(x, intermediates_only=True)
