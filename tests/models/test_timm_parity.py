"""Our models against timm's class: same state dict, same logits, statistics and gradients.

Fresh weights would prove little: the last gamma of each block is zero, so most gradients vanish.
Gammas are therefore random, with negative ones and ones a thousandth of the others, biases are
random, and the running statistics are those of a batch, so that activations keep their scale
through all blocks.
"""

import pytest
import timm.models.tresnet
import torch
from torch import nn

from tests.toys import snapshot, step, use_statistics
from tresnet.models.zoo import build

# what the README and issue promise, in float32
LOGITS, GRADIENTS = 1e-5, 1e-4

VARIANTS = [
    "tresnet_m",
    pytest.param("tresnet_xl", marks=pytest.mark.slow),
    pytest.param("tresnet_v2_l", marks=pytest.mark.slow),
]


def training_step(model, x):
    """Return `step` with logits times 30, for gradients far above noise."""
    return step(model.train(), x, lambda images: 30 * model(images))


@pytest.fixture(scope="module", params=VARIANTS)
def timms(request):
    """Timm's model: (name, state dict, images, their logits in eval mode, a training step)."""
    torch.manual_seed(0)
    model = getattr(timm.models.tresnet, request.param)()
    with torch.no_grad():
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d):
                nn.init.normal_(norm.weight)
                norm.weight[::5] *= 1e-3
                nn.init.normal_(norm.bias, std=0.2)
    use_statistics(model, torch.rand(2, 3, 96, 128))
    state, x = snapshot(model), torch.rand(2, 3, 96, 160)
    with torch.no_grad():
        logits = model.eval()(x)
    names = ("logits", *state)  # not the blurs' filters, which are in no state dict
    trained = {k: v for k, v in training_step(model, x).items() if k in names}
    return request.param, state, x, logits, trained


def error(found, expected):
    """Largest difference over the largest expected value."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize(("norm", "jit"), [("abn", False), ("batchnorm", True)])
def test_logits_statistics_and_gradients(timms, norm, jit):
    name, state, x, logits, expected = timms
    model = build(name, norm=norm, jit=jit)
    model.load_state_dict(state)
    assert logits.std() > 0.1
    with torch.no_grad():
        assert error(model.eval()(x), logits) < LOGITS
    found, parameters = training_step(model, x), dict(model.named_parameters())
    assert found.keys() == expected.keys() == {"logits", *state}
    for name, value in expected.items():
        if name in parameters:
            assert value.norm() > 1e-6, name  # else the comparison would be of noise
            assert (found[name] - value).norm() / value.norm() < GRADIENTS, name
        else:
            assert name == "logits" or not torch.equal(value, state[name]), name
            assert error(found[name].double(), value.double()) < LOGITS, name
