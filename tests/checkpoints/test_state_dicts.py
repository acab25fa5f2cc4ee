"""Files of `torch.save(model.state_dict())` are read by every model of the same layers."""

import importlib.util

import pytest
import torch

from tests.checkpoints.small import CLASSES, LAYERS, same, trained
from tresnet.checkpoints.creation import create

SMALL = {"layers": LAYERS, "width_factor": 0.3, "num_classes": CLASSES}  # widths no kernel likes
# Options of speed and of training, which change neither parameters nor outputs.
SPEEDS = [
    {},
    {"norm": "batchnorm"},
    {"jit": True},
    {"impl": "plain"},
    {"impl": "triton"},
    {"recompute": "none"},
    {"drop_rate": 0.1, "drop_path_rate": 0.1},
    {"dtype": torch.bfloat16},
    {"dtype": torch.float64},
]
if importlib.util.find_spec("inplace_abn"):
    SPEEDS.append({"norm": "inplace_abn"})
# Options of the layers: those that a reader repeats, as the parameters do not tell them, last.
LAYOUTS = [
    ({}, {}),
    ({"block_size": 2}, {}),
    ({"block_size": 1}, {}),
    ({"in_chans": 1}, {}),
    ({"block_size": 2, "in_chans": 1}, {}),
    ({"num_classes": 0}, {}),
    ({"width_factor": 0.25, "layers": (2, 1, 1, 1)}, {}),
    ({"head": "ml_decoder"}, {}),
    ({"head": "ml_decoder", "head_channels": 64}, {}),
    ({"head": "group_attention", "head_channels": 16}, {}),
    ({"head": "group_attention", "head_channels": 16, "head_groups": 2}, {}),
    ({"head": "group_attention", "head_channels": 16}, {"head_groups": [1, 4]}),
    ({}, {"global_pool": "avgmax"}),
    ({}, {"stem_slope": 0.3, "block_slope": 0.2}),
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.pth"


def written(path, name="tresnet_m", **options):
    model = trained(create(name, **SMALL | options))
    with torch.no_grad():  # inplace_abn has no gammas below its eps
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bn.weight"):
                parameter.abs_().add_(1e-3)
    torch.save(model.state_dict(), path)
    return model


@pytest.mark.parametrize("options", SPEEDS, ids=str)
def test_options_of_speed_change_no_state_dict(path, options):
    plain, model = written(path).state_dict(), create(weights=path, **options)
    dtype = options.get("dtype", torch.float32)
    wanted = {k: v.to(dtype) if v.is_floating_point() else v for k, v in plain.items()}
    assert same(model.state_dict(), wanted)
    fresh = create("tresnet_m", **SMALL | options)
    fresh.load_state_dict(plain)
    assert same(fresh.state_dict(), wanted)


@pytest.mark.parametrize("name", ["tresnet_m", "tresnet_v2_l"])
@pytest.mark.parametrize(("options", "repeated"), LAYOUTS, ids=str)
def test_the_layers_follow_from_the_parameters(path, name, options, repeated, caplog):
    source = written(path, name, **options, **repeated).eval()
    model = create(weights=path, **repeated).eval()
    assert ("other sizes by head_groups" in caplog.text) == bool(source.config.head_groups)
    assert same(model.state_dict(), source.state_dict())
    x = torch.rand(2, model.config.in_chans, 64, 64)
    with torch.no_grad():
        assert torch.equal(model(x), source(x))
