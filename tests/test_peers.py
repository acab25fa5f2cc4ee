"""Models of this package, of timm and of torchvision, by name."""

import socket

import pytest
import torch

from tresnet.peers import build_named, default_input_shape


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


def test_weights_of_a_backbone_are_not_fetched(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(socket, "create_connection", None)
    build_named("torchvision:fcn_resnet50", device="meta")
    assert not list(tmp_path.rglob("*.pth"))
