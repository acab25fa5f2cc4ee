"""Surgery drops nothing that watches or changes what it replaces: it refuses."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from tests.toys import images, network
from tresnet.errors import InputError
from tresnet.layers.norm import ABN
from tresnet.layers.subtracted_conv import SubtractedConv
from tresnet.surgery import compose, fold, swap_norm


def doubled(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, inputs, y: 2 * y)


def replaced(module: nn.Module) -> None:
    module.forward = lambda x, forward=module.forward: forward(x) / 2


def hooked_backward(module: nn.Module) -> None:
    module.register_full_backward_hook(lambda module, inputs, outputs: None)


CHANGES: list[tuple[str, Callable[[nn.Module], object]]] = [
    *[(name, doubled) for name in ("body.conv1", "body.conv1.conv", "body.layer2.0.conv2.bn")],
    ("body.layer1.0.conv1", lambda m: m.register_forward_pre_hook(lambda m, x: (x[0] + 1,))),
    ("body.layer1.0.conv1", hooked_backward),
    ("body.layer3.0.conv3.bn", replaced),
    ("body.layer3.0.conv1", replaced),
    ("body.layer4.0.conv1.conv", nn.utils.parametrizations.weight_norm),
    ("body.layer4.0.conv1.conv", lambda m: prune.l1_unstructured(m, "weight", 0.5)),
]


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_fold_refuses_what_it_would_drop(name: str, change: Callable[[nn.Module], object]):
    model = network()
    change(model.get_submodule(name))
    with pytest.raises(InputError, match=rf"{name} .*(remove it first|, remove it first)"):
        fold(model)


def test_hooks_elsewhere_and_norms_of_torch_fold():
    model, x = network(width_factor=0.25), images()
    model.body.layer2.register_forward_hook(lambda module, inputs, y: 2 * y)
    model.head.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    torch.testing.assert_close(fold(model)(x), model(x), rtol=1e-4, atol=1e-4)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    torch.testing.assert_close(fold(converted)(x), model(x), rtol=1e-4, atol=1e-4)


class Backwards(nn.Sequential):
    """Calls its children from the last to the first."""

    def forward(self, x):
        for child in reversed(self):
            x = child(x)
        return x


def test_only_children_that_follow_each_other_fold():
    conv, norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
    norm.running_mean.normal_()
    twice = nn.Sequential(conv, nn.ReLU(), nn.Conv2d(3, 3, 1), conv, norm).eval()
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(fold(twice)(x), twice(x))
    reverse = nn.Sequential(Backwards(conv, nn.BatchNorm2d(3)), nn.Conv2d(3, 3, 1), norm).eval()
    nn.init.normal_(reverse[0][1].running_mean)
    torch.testing.assert_close(fold(reverse)(x), reverse(x))


@pytest.mark.parametrize("change", [doubled, replaced, hooked_backward])
def test_swap_norm_refuses(change: Callable[[nn.Module], None]):
    model = network()
    change(model.body.conv1.bn)
    with pytest.raises(InputError, match=r"body.conv1.bn \(ABN\) has .*remove it first"):
        swap_norm(model, "batchnorm")
    assert type(model.body.conv1.bn) is ABN


@pytest.mark.parametrize("name", ["1", "1.low_pass"])
@pytest.mark.parametrize("change", [doubled, replaced])
def test_compose_refuses(name: str, change: Callable[[nn.Module], None]):
    model = nn.Sequential(nn.ReLU(), SubtractedConv(3, 4, 3))
    change(model.get_submodule(name))
    with pytest.raises(InputError, match=rf"{name} .* remove it first"):
        compose(model)
    with pytest.raises(InputError, match="remove it first"):
        compose(model[1], nn.Conv2d(4, 2, 1))


@pytest.mark.parametrize(
    "rewrite", [fold, compose, SubtractedConv.replace_in, lambda model: swap_norm(model, "abn")]
)
def test_what_is_no_model_is_refused(rewrite: Callable[[object], object]):
    for model in (None, "tresnet_m", torch.zeros(1)):
        with pytest.raises(InputError, match=r"expected a model \(torch.nn.Module\), got"):
            rewrite(model)
    with pytest.raises(InputError, match=r"change the model first, then torch\.compile"):
        rewrite(torch.compile(network()))
