"""Models and files small enough to make in a test: 16 base channels, one block a stage."""

import torch

from tests.models.public_network import PublicTResNet, randomise
from tresnet.models.zoo import build

LAYERS, PLANES, CLASSES = (1, 2, 1, 1), 16, 5


def small(name="tresnet_m", **kwargs):
    kwargs = {"num_classes": CLASSES, "layers": LAYERS, "width_factor": PLANES / 64} | kwargs
    return build(name, **kwargs)


def small_public(v2=False, **kwargs):
    model = PublicTResNet(LAYERS, PLANES, CLASSES, v2=v2, **kwargs)
    return randomise(model, torch.Generator().manual_seed(1))


@torch.no_grad()
def trained(model, seed=0):
    """Give every tensor a value of its own, as training does."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            values = torch.randn(tensor.shape, generator=generator) * 0.1
            tensor.copy_(values.abs() + 0.5 if name.endswith("running_var") else values)
        else:
            tensor.fill_(7)
    return model


def zeros(tensors):
    """A state dict of these shapes that shares one small storage, to be written quickly."""
    storage = torch.zeros(max(tensor.numel() for tensor in tensors.values()))
    return {key: storage[: t.numel()].view(t.shape) for key, t in tensors.items()}


def same(a, b):
    """Whether two state dicts hold the same keys and bits."""
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)


def snapshot(model):
    return {key: value.clone() for key, value in model.state_dict().items()}
