"""Models of this package, of timm and of torchvision, by name."""

import socket

import pytest
import torch

from tresnet.errors import InputError
from tresnet.peers import build_named, check_name, default_input_shape


def test_names_have_sources():
    for name in ("tresnet_m", "timm:resnet50.a1_in1k", "torchvision:resnet50"):
        check_name(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("keras:resnet50", "no source 'keras'"),
        ("tresnet_v2", "unknown model .*: did you mean 'tresnet_v2_l'.* torchvision:NAME"),
        ("TResNet_XL", "did you mean 'tresnet_xl'"),
        ("timm:resnet5O", "unknown model of timm 'resnet5O': did you mean 'resnet50'"),
        ("torchvision:resnet-50", "did you mean 'resnet50'"),
        ("timm:", "unknown model of timm '': expected one of"),
        ("timm:nosuch", "expected one of tnt_s_patch16_224, .* more$"),
        ("tresnet_m@norm=abn", "unknown model .*: did you mean 'tresnet_"),
        (3, "expected a model's name, got 3"),
    ],
)
def test_wrong_names_suggest_the_nearest(name, message):
    with pytest.raises(InputError, match=message):
        check_name(name)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("tresnet_t", (3, 32, 32)),
        ("timm:test_resnet", (3, 160, 160)),
        ("timm:tresnet_m", (3, 224, 224)),  # whose first convolution has 48 channels
        ("torchvision:squeezenet1_1", (3, 224, 224)),
    ],
)
def test_models_of_all_sources_are_built(name, shape):
    model = build_named(name, device="meta", num_classes=7, norm=None)
    assert default_input_shape(model) == shape
    assert all(p.is_meta for p in model.parameters())
    assert model(torch.empty(1, *shape, device="meta")).shape == (1, 7)


def test_options_reach_ours():
    model = build_named("tresnet_t", norm="abn", impl="plain", recompute="none")
    reads_gray = build_named("tresnet_t", norm="batchnorm", in_chans=1)
    assert model.runner == ("plain", "none")
    assert reads_gray.config.norm == "batchnorm"
    assert default_input_shape(reads_gray) == (1, 32, 32)
    assert default_input_shape(torch.nn.Sequential(reads_gray)) == (1, 224, 224)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("timm:resnet50", {"norm": "abn"}, "timm:resnet50 takes no option norm"),
        ("timm:poolformer_s12", {"impl": "auto"}, "timm:poolformer_s12 takes no option impl"),
        ("timm:hrnet_w18", {"head": "linear"}, "timm:hrnet_w18 takes no option head"),
        ("torchvision:convnext_tiny", {"norm": "abn"}, "convnext_tiny takes no option norm"),
        ("torchvision:resnet18", {"in_chans": 1}, "torchvision:resnet18 takes no option in_chans"),
    ],
)
def test_peers_refuse_what_they_have_not(name, options, message):
    with pytest.raises(InputError, match=message):
        build_named(name, device="meta", **options)


def test_weights_of_a_backbone_are_not_fetched(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(socket, "create_connection", None)
    build_named("torchvision:fcn_resnet50", device="meta")
    assert not list(tmp_path.rglob("*.pth"))
