import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tresnet.measure.macs import count_macs, count_parameters, output_sizes
from tresnet.models.zoo import build, list_models


@pytest.mark.parametrize("name", list_models())
def test_it_is_half_of_what_torch_counts(name):
    model = build(name, num_classes=7, device="meta").eval()
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(torch.empty(1, 3, 64, 96, device="meta"))
    assert 2 * count_macs(model, output_sizes(model, 64, 96)) == counter.get_total_flops()


def test_tied_parameters_count_once():
    model = torch.nn.Sequential(torch.nn.Linear(32, 5), torch.nn.Linear(32, 5))
    model[1].weight = model[0].weight
    assert count_parameters(model) == 32 * 5 + 2 * 5
