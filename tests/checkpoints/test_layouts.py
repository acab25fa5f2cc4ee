"""Weights in a directory or a hub's repository, as timm lays them out."""

import json

import pytest
import timm
import torch
from timm.models._hub import save_for_hf

import tresnet
import tresnet.timm_plugin
from tests.checkpoints.conftest import REPO
from tresnet.checkpoints.weights import open_weights
from tresnet.errors import CheckpointError

SMALL = {"layers": (1, 1, 1, 1), "width_factor": 0.25}
CLASSES = ["cat", "dog", "owl"]
CFG = {"input_size": [3, 160, 160], "crop_pct": 0.9, "interpolation": "bicubic"}


@pytest.fixture
def layout(tmp_path):
    """(the model, a directory that timm itself wrote)."""
    torch.manual_seed(1)
    model = timm.models.tresnet.tresnet_m(num_classes=3, **SMALL).eval()
    model.pretrained_cfg = {**model.pretrained_cfg, **CFG}
    folder = tmp_path / "layout"
    options = {"model_args": SMALL, "safe_serialization": "both"}
    save_for_hf(model, folder, {"label_names": CLASSES}, **options)
    return model, folder


@pytest.mark.parametrize("source", ["{}", "local-dir:{}", f"hf-hub:{REPO}"])
def test_what_timm_wrote_is_read_with_its_names_and_sizes(layout, hub, source):
    model, folder = layout
    if source.startswith("hf"):  # a repository of older times
        (folder / "model.safetensors").unlink()
    hub.repos[REPO] = {path.name: path.read_bytes() for path in folder.iterdir()}
    name = source.format(folder)
    found = tresnet.create(weights=name).eval()
    x = torch.rand(2, 3, 64, 64)
    assert torch.equal(found(x), model(x))
    info = open_weights(name)
    assert (info.name, info.config.variant, info.classes) == (name, "tresnet_m", tuple(CLASSES))
    cfg = info.pretrained_cfg
    assert (cfg["input_size"], cfg["crop_pct"]) == ((3, 160, 160), 0.9)
    assert found.pretrained_cfg["interpolation"] == "bicubic"


def test_ours_in_the_layout_speak_for_themselves(tmp_path):
    model = tresnet.create("tresnet_s", num_classes=3, **SMALL)
    tresnet.save_checkpoint(model, tmp_path / "model.safetensors", metadata={"classes": CLASSES})
    (tmp_path / "config.json").write_text(json.dumps({"label_names": ["other", "names", "here"]}))
    assert open_weights(tmp_path).classes == tuple(CLASSES)
    assert open_weights(tmp_path).config.variant == "tresnet_s"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"timm's config.json in .* \(JSONDecodeError\): Expecting property name"),
        ('{"label_names": ["one"]}', "names of 3 classes, got 1"),
        ('{"pretrained_cfg": {"input_size": [1, 9, 9]}}', r"expected input_size \(3, height"),
        ('{"label_names": {"0": "a", "1": "b", "10": "c"}}', r"\(KeyError\): '2'"),
        ('{"model_args": {"act_layer": "relu"}}', "unknown argument of a model 'act_layer'"),
        ('{"model_args": {"block_size": 2.5}}', "block_size: expected a valid integer, got 2.5"),
        ('{"pretrained_cfg": 5}', "expected pretrained_cfg with named values"),
        ('{"pretrained_cfg": {"mean": [0.485, 0.456, 0.406]}}', r"by mean \(0\.485, .* as they"),
        ('{"std": [0.5, 0.5, 0.5]}', r"mean 0 and std 1, got .*std \(0\.5, 0\.5, 0\.5\)"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(layout, content, message):
    """The last has the layout of timm's first versions, without `pretrained_cfg`."""
    (layout[1] / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        tresnet.create(weights=layout[1])


def test_the_model_is_the_one_that_timm_builds(tmp_path):
    torch.manual_seed(1)
    args = {**SMALL, "global_pool": "max", "drop_rate": 0.25}
    model = timm.models.tresnet.tresnet_m(num_classes=3, **args).eval()
    save_for_hf(model, tmp_path, model_args=args)
    found = tresnet.create(weights=tmp_path).eval()
    x = torch.rand(2, 3, 64, 64)
    assert torch.equal(found(x), model(x))
    assert (found.config.global_pool, found.config.drop_rate) == ("max", 0.25)
    assert tresnet.create(weights=tmp_path, drop_rate=0.0).config.drop_rate == 0
    (tmp_path / "config.json").write_text('{"model_args": {"num_classes": 4}}')
    with pytest.raises(CheckpointError, match=r"head\.fc"):
        tresnet.create(weights=tmp_path)


def test_what_is_missing_is_said(layout, tmp_path):
    with pytest.raises(CheckpointError, match=r"model\.safetensors or pytorch_model\.bin in .*nei"):
        tresnet.create(weights=f"local-dir:{tmp_path}")
    (layout[1] / "config.json").write_text('{"crop_pct": null}')
    assert open_weights(layout[1]).pretrained_cfg["crop_pct"] == 0.875
    (layout[1] / "config.json").unlink()
    assert open_weights(layout[1]).classes is None
