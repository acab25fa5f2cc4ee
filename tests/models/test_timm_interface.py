"""Methods that timm's users call on a model, compared with timm's own TResNet."""

import copy

import pytest
import timm
import torch

from tresnet.errors import InputError
from tresnet.models.tresnet import feature_extractor, take_indices
from tresnet.models.zoo import build

SMALL = {"layers": [1, 1, 2, 1], "width_factor": 0.25, "num_classes": 11}


@pytest.fixture(scope="module")
def pair():
    """timm's class and ours at a small size, with the same weights, in eval mode."""
    theirs = timm.models.tresnet.TResNet(**SMALL)
    ours = build("tresnet_m", **SMALL)
    ours.load_state_dict(theirs.state_dict())
    return theirs.eval(), ours.eval()


@pytest.fixture
def images():
    return torch.rand(2, 3, 64, 96)


def test_features_and_head(pair, images):
    maps = [model.forward_features(images) for model in pair]
    torch.testing.assert_close(*maps)
    for pre_logits in [False, True]:
        outputs = (model.forward_head(maps[0], pre_logits=pre_logits) for model in pair)
        torch.testing.assert_close(*outputs)
    assert pair[1].num_features == pair[0].num_features == pair[1].head_hidden_size
    ours = copy.deepcopy(pair[1])
    ours.head = torch.nn.Identity()  # as timm's, a head of one's own need not know pre_logits
    assert torch.equal(ours(images), maps[1])
    assert torch.equal(torch.jit.script(ours)(images), maps[1])
    assert (ours.get_classifier(), ours.head_hidden_size) == (ours.head, ours.num_features)


@pytest.mark.parametrize("indices", [None, 2, [0, 3], [-1], (1, 2, 3, 4)])
@pytest.mark.parametrize("stop_early", [False, True])
def test_forward_intermediates(pair, images, indices, stop_early):
    theirs, ours = pair
    options = {"indices": indices, "stop_early": stop_early}
    for x, y in zip(
        ours.forward_intermediates(images, intermediates_only=True, **options),
        theirs.forward_intermediates(images, intermediates_only=True, **options),
        strict=True,
    ):
        torch.testing.assert_close(x, y)
    final, maps = ours.forward_intermediates(images, indices)
    torch.testing.assert_close(final, ours.forward_features(images))
    assert len(maps) == len(take_indices(indices, 5))


@pytest.mark.parametrize("out_indices", [None, (0, 2), (4,), 3, (-2,)])
def test_features_only(pair, images, out_indices):
    theirs, ours = pair
    fresh = build("tresnet_m", **SMALL).eval()
    fresh.load_state_dict(ours.state_dict())
    backbone = feature_extractor(fresh, out_indices)
    maps = backbone(images)
    indices = (1, 2, 3, 4) if out_indices is None else out_indices
    expected = theirs.forward_intermediates(images, indices, intermediates_only=True)
    assert len(maps) == len(expected)
    for x, y in zip(maps, expected, strict=True):
        torch.testing.assert_close(x, y)
    assert backbone.feature_info.channels() == [x.shape[1] for x in maps]
    assert backbone.feature_info.reduction() == [images.shape[2] // x.shape[2] for x in maps]
    assert not any("head.fc" in name for name in backbone.state_dict())
    sum(x.square().mean() for x in maps).backward()
    assert all(p.grad is not None for p in backbone.parameters()), "later stages are gone"


def test_a_map_changed_in_place_is_an_error_in_backward():
    first, second = feature_extractor(build("tresnet_t"), (1, 2))(torch.rand(2, 3, 32, 32))
    first.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.sum().backward()


def test_reset_classifier(images):
    model = build("tresnet_t", dtype=torch.float64, drop_rate=0.5).eval()
    images = images.double()
    model.reset_classifier(5)
    assert model.num_classes == model.config.num_classes == 5
    assert model.head.fc.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert not model.head.drop.training
    model.reset_classifier(3, "max")
    features = model.forward_features(images)
    assert torch.equal(model.forward_head(features), model.head.fc(features.amax((2, 3))))
    model.reset_classifier(0, "")
    assert model(images).dim() == 4


def test_a_refused_reset_changes_nothing(images):
    model = build("tresnet_t", num_classes=7)
    for arguments in [(3, "zzz"), (-5,), (4, "")]:
        with pytest.raises(InputError):
            model.reset_classifier(*arguments)
        assert model.num_classes == model.config.num_classes == 7
        assert model.config.global_pool == "avg"
        assert model(images).shape == (2, 7)


def test_group_matcher_and_layer_decay(pair):
    from timm.models import group_parameters

    theirs, ours = pair
    for coarse in [False, True]:
        groups = group_parameters(ours, ours.group_matcher(coarse=coarse))
        assert groups == group_parameters(theirs, theirs.group_matcher(coarse=coarse))
    assert ours.no_weight_decay() == set()


@pytest.mark.parametrize("pool", ["avg", "fast", "max", "avgmax"])
def test_pools_equal_timms(pool):
    from timm.layers import SelectAdaptivePool2d

    x = torch.randn(2, 512, 3, 5)
    head = build("tresnet_t", num_classes=0, global_pool=pool).head
    torch.testing.assert_close(head(x), SelectAdaptivePool2d(pool_type=pool, flatten=True)(x))
