"""Exchanged norms: the same function, the same parameters, and gammas that in-place ABN lacks."""

import pytest
import torch
from torch import nn

from tests.toys import (
    NEEDS_PACKAGE,
    NORMS,
    features,
    images,
    network,
    same,
    snapshot,
)
from tresnet.errors import InputError
from tresnet.fused import Runner
from tresnet.layers.norm import NORMS as CLASSES
from tresnet.layers.norm import InplaceABN, NormAct
from tresnet.models.tresnet import feature_extractor
from tresnet.models.zoo import build
from tresnet.surgery import swap_norm


def positive(model):
    """Make every gamma one that in-place ABN can represent."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, NormAct):
                module.weight.abs_()
    return model


def norms(model):
    return [module for module in model.modules() if isinstance(module, NormAct)]


@pytest.mark.parametrize("old", NORMS)
@pytest.mark.parametrize("new", NORMS)
def test_the_function_and_the_parameters_stay(old, new):
    model = network(norm=old).double()
    if new == "inplace_abn" != old:
        positive(model)
    model.set_slopes(2**-7, 2**-10)
    x = images(torch.double)
    with torch.no_grad():
        before = features(model, x)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    assert swap_norm(model, new) is model
    assert {type(module) for module in norms(model)} == {CLASSES[new]}
    assert model.config.norm == new
    assert list(dict(model.named_parameters())) == list(parameters)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name], name
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name], name
    with torch.no_grad():
        torch.testing.assert_close(features(model, x), before, rtol=1e-9, atol=1e-9)


def test_settings_go_along():
    model = network()
    model.set_slopes(0.3, 0.2)
    model.body.conv1.bn.eps, model.body.conv1.bn.momentum = 1e-3, 0.4
    model.body.conv1.bn.requires_grad_(False)
    swap_norm(model, "batchnorm")
    stem = model.body.conv1.bn
    assert (stem.slope, stem.eps, stem.momentum) == (0.3, 1e-3, 0.4)
    assert model.body.layer1[0].conv2.bn.slope is None
    assert not stem.weight.requires_grad
    assert not stem.training


@pytest.mark.parametrize("has_statistics", [True, False])
def test_statistics_that_are_not_tracked_are_not_tracked_afterwards(has_statistics):
    model, x = network().train(), images()
    for module in norms(model):
        module.track_running_stats = False
        if not has_statistics:
            module.running_mean = module.running_var = None
    before, expected = snapshot(model), model(x)
    torch.testing.assert_close(swap_norm(model, "batchnorm")(x), expected)
    assert all(module.training for module in norms(model))
    assert same(model.state_dict(), before)


@pytest.mark.parametrize("between", NORMS)
def test_the_runner_survives_another_norm(between):
    model = positive(network())
    model.runner = Runner("triton", "none")
    swap_norm(swap_norm(model, between), "abn")
    assert model.runner == ("triton", "none")


@NEEDS_PACKAGE
@pytest.mark.parametrize("gamma", [0.0, -0.5, 9e-6])
def test_gammas_in_place_abn_lacks_are_named(gamma):
    model = positive(network())
    with torch.no_grad():
        model.body.layer2[1].conv2.bn.weight[3] = gamma
    before = snapshot(model)
    with pytest.raises(
        InputError, match=r"body\.layer2\.1\.conv2\.bn \(1 of 38\): keep norm='abn'"
    ):
        swap_norm(model, "inplace_abn")
    assert same(model.state_dict(), before)
    assert not any(isinstance(module, InplaceABN) for module in norms(model))
    assert model.config.norm == "abn"


@NEEDS_PACKAGE
def test_a_fresh_model_says_how_many_more_layers_unless_it_has_no_values():
    with pytest.raises(InputError, match=r"conv2\.bn \(16 of 16\).* and 4 more: keep"):
        swap_norm(build("tresnet_t"), "inplace_abn")
    model = swap_norm(build("tresnet_t", device="meta"), "inplace_abn")
    assert {type(module) for module in norms(model)} == {InplaceABN}


def test_a_feature_extractor_swaps_and_a_shared_norm_stays_shared():
    extractor = feature_extractor(network(), (1, 2)).eval()
    swap_norm(extractor, "batchnorm")
    assert extractor.config.norm == extractor.model.config.norm == "batchnorm"
    norm = NormAct(4)
    pair = swap_norm(nn.Sequential(norm, norm), "abn")
    assert pair[0] is pair[1]
