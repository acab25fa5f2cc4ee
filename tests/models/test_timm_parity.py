"""Our models against timm's class: same state dict, same logits, statistics and gradients.

Fresh weights would prove little: the last gamma of each block is zero, so most gradients vanish.
Gammas are therefore random, with negative ones and ones a thousandth of the others, biases are
random, and the running statistics are those of a batch, so that activations keep their scale
through all blocks.
"""

from types import SimpleNamespace

import pytest
import timm.models.tresnet
import torch
from torch import nn

from tresnet.models.zoo import build

# what the README and issue promise, in float32
LOGITS, GRADIENTS = 1e-5, 1e-4

VARIANTS = [
    "tresnet_m",
    pytest.param("tresnet_xl", marks=pytest.mark.slow),
    pytest.param("tresnet_v2_l", marks=pytest.mark.slow),
]


def randomise(model, generator):
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    with torch.no_grad():
        for norm in norms:
            norm.weight.copy_(torch.randn(norm.weight.shape, generator=generator))
            norm.weight[::5] *= 1e-3
            norm.bias.copy_(torch.randn(norm.bias.shape, generator=generator) * 0.2)
            norm.momentum = 1.0  # the statistics of the next batch
        model.train()(torch.rand(2, 3, 96, 128, generator=generator))
    for norm in norms:
        norm.momentum = 0.1


@pytest.fixture(scope="module", params=VARIANTS)
def peer(request):
    generator = torch.Generator().manual_seed(0)
    model = getattr(timm.models.tresnet, request.param)()
    randomise(model, generator)
    return request.param, model, {k: v.clone() for k, v in model.state_dict().items()}


@pytest.fixture(scope="module")
def reference(peer):
    """Results of timm's model for one input."""
    name, model, state = peer
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(2, 3, 96, 160, generator=generator)
    direction = torch.randn(len(x), 1000, generator=generator)
    model.load_state_dict(state)
    with torch.no_grad():
        eval_logits = model.eval()(x)
    model.zero_grad()
    train_logits = model.train()(x)
    (train_logits * direction).sum().backward()
    grads = {k: p.grad for k, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return SimpleNamespace(
        name=name, state=state, x=x, direction=direction, eval_logits=eval_logits, grads=grads,
        train_logits=train_logits.detach(),
        buffers={k: v.clone() for k, v in model.state_dict().items() if k not in grads},
    )  # fmt: skip


def build_loaded(reference, **kwargs):
    model = build(reference.name, **kwargs)
    model.load_state_dict(reference.state)
    return model


def error(found, expected):
    """Largest difference over the largest expected value."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize(
    "kwargs", [{"norm": "abn"}, {"norm": "batchnorm"}, {"norm": "abn", "jit": True}], ids=str
)
def test_logits_in_eval_mode(reference, kwargs):
    model = build_loaded(reference, **kwargs).eval()
    with torch.no_grad():
        found = model(reference.x)
    assert reference.eval_logits.std() > 0.1
    assert error(found, reference.eval_logits) < LOGITS


@pytest.mark.parametrize("norm", ["abn", "batchnorm"])
def test_logits_statistics_and_gradients_in_training(reference, norm):
    model = build_loaded(reference, norm=norm).train()
    found = model(reference.x)
    (found * reference.direction).sum().backward()
    assert error(found, reference.train_logits) < LOGITS
    buffers = dict(model.named_buffers())
    assert buffers.keys() == reference.buffers.keys()
    changed = [k for k in buffers if not torch.equal(reference.buffers[k], reference.state[k])]
    assert len(changed) == len(buffers)
    worst = max(error(buffers[k].double(), reference.buffers[k].double()) for k in buffers)
    assert worst < LOGITS
    errors = {}
    for name, parameter in model.named_parameters():
        expected = reference.grads[name]
        assert expected.norm() > 1e-6, name  # else the comparison would be of noise
        errors[name] = ((parameter.grad - expected).norm() / expected.norm()).item()
    assert max(errors.values()) < GRADIENTS, max(errors, key=errors.get)
