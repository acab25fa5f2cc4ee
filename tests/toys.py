"""Small models for tests, one training step of a model, and comparisons of state dicts."""

from importlib.util import find_spec

import pytest
import torch

from tests.models.public_network import PublicTResNet, randomise
from tresnet.checkpoints.creation import create

NEEDS_PACKAGE = pytest.mark.skipif(
    find_spec("inplace_abn") is None, reason="the inplace-abn package is not installed"
)
INPLACE = pytest.param("inplace_abn", marks=NEEDS_PACKAGE)
NORMS = ["abn", "batchnorm", INPLACE]
LAYERS, PLANES, CLASSES = (1, 2, 1, 1), 16, 5
ODD_WIDTH = 0.3  # 19, 38, 76 channels: not multiples of 8, as in tresnet_l and tresnet_xl


def small(name="tresnet_m", **options):
    """Create a model with 16 base channels, one or two blocks per stage and 5 classes."""
    options = {"num_classes": CLASSES, "layers": LAYERS, "width_factor": PLANES / 64} | options
    return create(name, **options)


def smallest(name="tresnet_t", **options):
    """Create a model with 8 base channels, one block per stage and 3 classes."""
    options = {"num_classes": 3, "layers": (1, 1, 1, 1), "width_factor": 0.125} | options
    return create(name, **options)


def small_public(v2=False, filters=False, dtype=torch.float32):
    """Build a model of the public TResNet code with the same sizes as `small`."""
    model = PublicTResNet(LAYERS, PLANES, CLASSES, v2, filters).to(dtype)
    return randomise(model, torch.Generator().manual_seed(1)).use_inplace_abn()


def network(name="tresnet_t", norm="abn", **options):
    """Create a model of 19 base channels (v2: 16) in eval mode, whose gammas have either sign."""
    options = {"width_factor": ODD_WIDTH, "num_classes": 7, "layers": (1, 2, 1, 2)} | options
    model = trained(small(name, norm=norm, **options))
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "running_var"):
                module.weight.uniform_(0.5, 1.5)
                # in-place ABN computes the same results for the gammas g and 2 * eps - g
                center = 2 * module.eps if norm == "inplace_abn" else 0.0
                module.weight[::3] = center - module.weight[::3]
    if norm == "inplace_abn":
        model.set_slopes(2**-7, 2**-10)  # exact in float32, which the inplace-abn package uses
    return model.eval()


@torch.no_grad()
def trained(model, seed=0):
    """Give each tensor of the model different random values, as if it were trained."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            values = torch.randn(tensor.shape, generator=generator) * 0.1
            tensor.copy_(values.abs() + 0.5 if name.endswith("running_var") else values)
        else:
            tensor.fill_(7)
    return model


@torch.no_grad()
def use_statistics(model, x):
    """Set running statistics to the batch statistics of `x`, so that eval mode normalises maps."""
    norms = [module for module in model.modules() if hasattr(module, "running_var")]
    for norm in norms:
        norm.momentum = 1.0
    model.train()(x)
    for norm in norms:
        norm.momentum = 0.1


def images(dtype=torch.float32, batch=2, height=36, width=28):
    return torch.rand(batch, 3, height, width, dtype=dtype)


def features(model, x):
    return model.forward_intermediates(x, intermediates_only=True)


def sgd(parameters, **options):
    return torch.optim.SGD(parameters, lr=0.01, **options)


def mean(output, target):
    """Return the mean output, a loss that allocates almost no memory."""
    return output.mean()


def step(model, x, run=None):
    """Return logits, gradients and buffers by name after one forward and backward of `run`."""
    torch.manual_seed(0)  # for stochastic depth
    model.zero_grad()
    logits = model(x) if run is None else run(x)
    logits.square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return {"logits": logits.detach(), **gradients, **buffers}


def zeros(tensors):
    """Return a state dict of these shapes; its tensors share one storage, so the file is small."""
    storage = torch.zeros(max(tensor.numel() for tensor in tensors.values()))
    return {key: storage[: t.numel()].view(t.shape) for key, t in tensors.items()}


def same(a, b):
    """Return whether two state dicts hold equal keys and bits."""
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)


def snapshot(model):
    return {key: value.clone() for key, value in model.state_dict().items()}
