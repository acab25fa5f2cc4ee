import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tresnet.measure.macs import count_macs, count_parameters
from tresnet.models.zoo import build, list_models

ODD = {"layers": (1, 5, 1, 1), "block_size": 2, "in_chans": 4}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in list_models()),
        *(("tresnet_t", o) for o in (ODD, {"head": "group_attention"}, {"head": "ml_decoder"})),
    ],
)
def test_macs_are_half_of_what_torch_counts(name, options):
    model = build(name, num_classes=7, device="meta", **options).eval()
    image = torch.empty(1, model.in_chans, 64, 96, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(image)
    macs, sizes = count_macs(model, 64, 96)
    last_layer = 1e-3 if "head" in options else 0
    assert 2 * macs == pytest.approx(counter.get_total_flops(), rel=last_layer)
    maps = model.forward_intermediates(image, intermediates_only=True)
    stages = [sizes[stage["module"]] for stage in model.feature_info]
    assert stages == [tuple(features.shape[2:]) for features in maps]


def test_tied_parameters_count_once():
    model = torch.nn.Sequential(torch.nn.Linear(32, 5), torch.nn.Linear(32, 5))
    model[1].weight = model[0].weight
    assert count_parameters(model) == 32 * 5 + 2 * 5
