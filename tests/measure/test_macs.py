import torch
from torch import nn

from tresnet.measure.macs import count_macs, count_parameters, without_computing
from tresnet.models.zoo import build


def test_known_convolution_and_linear():
    with without_computing():
        model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.Flatten(), nn.Linear(8 * 4, 5))
        assert count_macs(model, (2, 3, 4, 4)) == 2 * (8 * 3 * 9 * 4 + 32 * 5)
    assert count_parameters(model) == 8 * 27 + 32 * 5 + 5


def test_training_mode_is_put_back():
    with without_computing():
        model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8))
        count_macs(model, (1, 3, 1, 1))  # in training mode one value a channel is an error
    assert model.training


def test_nothing_is_allocated():
    with without_computing():
        weight = build("tresnet_t").get_parameter("head.fc.weight")
    assert isinstance(weight, torch.Tensor)
    assert weight.untyped_storage().device.type == "meta"
