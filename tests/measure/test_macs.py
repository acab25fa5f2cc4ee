import torch

from tresnet.measure.macs import count_parameters


def test_tied_parameters_count_once():
    model = torch.nn.Sequential(torch.nn.Linear(32, 5), torch.nn.Linear(32, 5))
    model[1].weight = model[0].weight
    assert count_parameters(model) == 32 * 5 + 2 * 5
