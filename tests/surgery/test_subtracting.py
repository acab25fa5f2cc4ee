"""Swapped convolutions of whole models, and their fusion back into plain ones."""

import collections

import pytest
import torch
from torch import nn

import tresnet
from tresnet.errors import InputError
from tresnet.layers.subtracted_conv import SubtractedConv
from tresnet.surgery.subtracting import factor_parameters, fuse, replace_conv


def resnet50(source: str) -> nn.Module:
    with torch.device("meta"):
        if source == "timm":
            import timm

            return timm.create_model("resnet50")
        import torchvision

        return torchvision.models.resnet50()


def millions(model: nn.Module) -> float:
    return round(sum(p.numel() for p in model.parameters()) / 1e6, 2)


@pytest.mark.parametrize("source", ["torchvision", "timm"])
def test_resnet50_gets_the_documents_16_million(source: str):
    model = resnet50(source)
    assert millions(model) == 25.56
    names = replace_conv(model)
    assert collections.Counter(name.rpartition(".")[2] for name in names) == {
        "conv1": 16,
        "conv2": 16,
    }
    assert millions(model) == 15.87
    assert all(isinstance(model.get_submodule(name), SubtractedConv) for name in names)


@pytest.mark.parametrize(("which", "count", "left"), [("spatial", 17, 17.76), ("all", 53, 18.44)])
def test_no_other_choice_comes_near(which: str, count: int, left: float):
    model = resnet50("torchvision")
    assert len(replace_conv(model, which=which)) == count
    assert millions(model) == left


def test_the_count_of_factors_is_that_of_the_module():
    conv = nn.Conv2d(6, 10, 5, padding=2, bias=False)
    module = SubtractedConv(6, 10, 5)
    assert factor_parameters(conv) == sum(p.numel() for p in module.parameters())


def small() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding="same", bias=False), nn.Conv2d(8, 4, 1)),
    )


def test_shapes_stay_and_unsuitable_ones_are_left_alone():
    model, x = small(), torch.randn(2, 3, 9, 11)
    shape = model(x).shape
    assert replace_conv(model, which="all", mode="recompute") == ["0", "3.0"]
    assert model[3][0].mode == "recompute"
    assert type(model[3][1]) is nn.Conv2d
    assert model(x).shape == shape


@pytest.mark.parametrize("mode", ["branches", "composed", "recompute"])
def test_the_memory_of_every_mode_can_be_predicted(mode: str):
    model = nn.Sequential(small(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    replace_conv(model, which="all", mode=mode)
    prediction = tresnet.memory.predict(model, batch_size=2, input_size=16)
    assert prediction.end_allocated_bytes > 0


def test_fusing_keeps_outputs_and_leaves_plain_convolutions():
    model = small().double()
    replace_conv(model, which="all")
    x = torch.randn(2, 3, 9, 11, dtype=torch.float64)
    model.eval()
    expected = model(x)
    assert fuse(model) is model
    assert not any(isinstance(m, SubtractedConv) for m in model.modules())
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-10)


def test_a_shared_convolution_is_swapped_once_in_all_its_places():
    conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
    model = nn.Sequential(conv, nn.ReLU(), nn.Sequential(conv))
    assert replace_conv(model, which="all") == ["0", "2.0"]
    assert model[0] is model[2][0]
    fuse(model)
    assert model[0] is model[2][0]
    assert type(model[0]) is nn.Conv2d


def test_what_was_swapped_before_is_left_alone():
    model = small()
    replace_conv(model, which="spatial")
    before = [module for module in model.modules() if isinstance(module, SubtractedConv)]
    model[3].append(nn.Conv2d(4, 4, 1, bias=False))
    assert replace_conv(model, which="all") == ["3.2"]
    assert all(type(module.point_wise) is nn.Conv2d for module in before)
    assert model(torch.randn(2, 3, 9, 11)).shape == (2, 4, 5, 6)


def test_a_lone_module_is_returned_as_a_convolution():
    assert type(fuse(SubtractedConv(3, 4, 3))) is nn.Conv2d


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.Sequential(nn.ReLU()), {}, "of the 0 in Sequential"),
        (nn.Sequential(nn.Conv2d(3, 4, 3)), {}, "0: its padding is not kernel // 2"),
        (nn.Sequential(nn.Conv2d(3, 4, 3, padding=1)), {}, "0: it has a bias"),
        (nn.Sequential(nn.Conv2d(3, 5, 1, bias=False)), {}, "channels is odd"),
        (nn.Sequential(nn.Conv2d(4, 4, 1, groups=2, bias=False)), {}, "it has groups"),
        (nn.Sequential(nn.Conv2d(3, 9 * 8, 1, bias=False)), {}, "none of the others"),
        (nn.Conv2d(4, 4, 1, bias=False), {"which": "all"}, "inside the model .* the 0 in Conv2d"),
        (nn.Sequential(nn.LazyConv2d(4, 1, bias=False)), {}, "0: it is lazy and has never run"),
        (tresnet.create("tresnet_l", pad=8, device="meta"), {}, "got a padded one"),
        (small(), {"which": "most"}, "smaller, spatial, all, or a function, got 'most'"),
        (small(), {"mode": "most"}, "branches, composed, recompute, got 'most'"),
    ],
)
def test_bad_input_is_refused(model: nn.Module, options: dict[str, str], message: str):
    with pytest.raises(InputError, match=message):
        replace_conv(model, **options)


def test_nothing_to_fuse_is_said():
    with pytest.raises(InputError, match="expected a SubtractedConv in Sequential, found none"):
        fuse(small())
