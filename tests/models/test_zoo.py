"""The table of variants: published sizes, structure, bad arguments."""

import functools
import json
from pathlib import Path

import pytest
import torch

import tresnet
from tresnet.measure.macs import count_macs, count_parameters
from tresnet.models.zoo import VARIANTS, build, image_size, list_models

GOLDEN = Path(__file__).parents[1] / "golden" / "zoo.json"

# Parameters with 1000 classes and GFLOP at 224, of the public code and timm
PUBLISHED = {
    "tresnet_m": (31_389_032, 11.47),
    "tresnet_l": (55_989_256, 21.76),
    "tresnet_xl": (78_436_244, 30.33),
    "tresnet_v2_l": (46_174_824, 17.63),
}


@functools.cache
def complexity(name):
    """Return parameters and multiply-accumulates of convolutions and matrices at the own size."""
    size = VARIANTS[name].input_size
    model = build(name, device="meta")
    macs, _ = count_macs(model, size, size)
    return {"parameters": count_parameters(model), "macs": macs, "pixels": size}


def test_names():
    assert list_models() == tresnet.list_models() == sorted(VARIANTS)
    assert list_models("*_v2_*") == ["tresnet_v2_l", "tresnet_v2_xl"]
    assert image_size({"input_size": (3, 32, 32)}) == 32
    assert image_size({"input_size": (3, 32, 64)}) == (32, 64)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_size(name):
    parameters, gflop = PUBLISHED[name]
    found = complexity(name)
    assert found["parameters"] == parameters
    assert found["macs"] * 2 / 1e9 == pytest.approx(gflop, abs=0.006)


def logits(name):
    """Return the first logits of a seeded model with live branches on a seeded image.

    Of five digits, which machines agree on, so that writing the file anew changes no other row.
    """
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    model = build(name).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
        values = model(torch.rand(1, 3, 64, 64, generator=generator))[0, :6].tolist()
    return [float(f"{value:.5g}") for value in values]


def golden():
    """Return what the golden file should hold."""
    found = {name: dict(complexity(name)) for name in list_models()}
    for name in ["tresnet_t", "tresnet_s"]:
        found[name]["logits"] = logits(name)
    return found


def test_golden():
    """Compare with the golden file, which `python -m tests.golden zoo` writes anew."""
    found, expected = golden(), json.loads(GOLDEN.read_text())
    both = [[row.pop("logits", []) for row in rows.values()] for rows in (found, expected)]
    assert found == expected
    for values, frozen in zip(*both, strict=True):
        assert values == pytest.approx(frozen, rel=1e-4)


@pytest.mark.parametrize("name", ["tresnet_m", "tresnet_v2_l"])
def test_initial_weights(name):
    """Kaiming normal by fan-out, last norms zero, linear weights with deviation 0.01."""
    model = build(name, norm="batchnorm")
    assert model.pretrained_cfg["pool_size"] == (7, 7)
    conv = model.body.layer3[1].conv2.conv.weight
    assert conv.std().item() == pytest.approx((2 / (1 + 0.01**2) / (256 * 9)) ** 0.5, rel=0.02)
    assert model.head.fc.weight.std().item() == pytest.approx(0.01, rel=0.02)
    for stage in list(model.body)[2:]:
        for block in stage:
            last = getattr(block, "conv3", block.conv2).bn
            assert last.weight.count_nonzero() == 0
            assert torch.equal(block.conv1.bn.weight, torch.ones_like(block.conv1.bn.weight))
            assert last.slope is None
