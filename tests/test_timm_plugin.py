import copy
import json
import runpy
import sys

import pytest
import timm
import timm.data
import timm.utils
import torch
from timm.models import _hub, _registry

import tresnet
from tests.forks import run_forked
from tests.toys import CLASSES, same, small, small_public, trained
from tresnet.checkpoints.save import save_checkpoint
from tresnet.errors import CheckpointError
from tresnet.models.tresnet import TResNet
from tresnet.models.zoo import list_models
from tresnet.peers import build_named

SMALL = {"layers": (1, 2, 1, 1), "width_factor": 0.25}
# timm's registries, which are restored, because other tests expect timm's own tresnet_m
TABLES = [
    value
    for name, value in vars(_registry).items()
    if isinstance(value, dict | set) and not name.startswith("__")
]


@pytest.fixture(scope="module", autouse=True)
def plugin():
    """Register our models with timm during the tests of this file."""
    before = copy.deepcopy(TABLES)
    import tresnet.timm_plugin

    tresnet.timm_plugin._register()  # again, in case another test has imported the plugin
    yield
    for table, contents in zip(TABLES, before, strict=True):
        table.clear()
        table.update(contents)


@pytest.fixture
def timms(tmp_path):
    """Return a model, and the path of its weights in timm's format."""
    model = trained(small()).eval()
    save_checkpoint(model, tmp_path / "a.safetensors", format="timm")
    return model, tmp_path / "a.safetensors"


def create(name="tresnet_m", path=None, **kwargs):
    """Build a small model by timm.create_model, with the weights of `path` if given."""
    if path is not None:
        kwargs |= {"pretrained": True, "pretrained_cfg_overlay": {"file": path}}
        kwargs["pretrained_cfg_overlay"]["num_classes"] = CLASSES
    return timm.create_model(name, **SMALL, **kwargs)


@pytest.mark.parametrize("name", ["tresnet_m", "tresnet_l", "tresnet_xl", "tresnet_v2_l"])
def test_tags_and_the_default_are_timms(name):
    theirs = timm.models.tresnet.default_cfgs[name].tags
    assert {f"{name}.{tag}" for tag in theirs} <= {*timm.list_pretrained(f"{name}.*")}
    default = timm.models.get_pretrained_cfg(name)
    assert (default.tag, default.hf_hub_id) == (theirs[0], f"timm/{name}.{theirs[0]}")


@pytest.mark.parametrize("name", ["tresnet_m", "tresnet_m.miil_in1k"])
def test_a_peer_from_timm_stays_timms(name):
    assert type(create(name)).__module__ == "tresnet.models.tresnet"
    peer = build_named(f"timm:{name}", num_classes=7)
    assert type(peer).__module__ == "timm.models.tresnet"
    assert peer.num_classes == 7


def test_our_arguments_and_timms():
    options = {"num_classes": 7, "in_chans": 1, "drop_rate": 0.1, "drop_path_rate": 0.2}
    options |= {"global_pool": "max", "norm": "batchnorm", "block_size": 2}
    model = create(**options)
    assert options.items() <= vars(model.config).items()
    assert model(torch.rand(2, 1, 32, 32)).shape == (2, 7)


def test_pretrained_from_a_file_with_its_slopes(tmp_path):
    source = trained(small())
    source.set_slopes(1e-6, 1e-6)
    save_checkpoint(source, tmp_path / "model.safetensors")
    for path in (tmp_path / "model.safetensors", tmp_path):
        model = create(path=path)
        assert same(model.state_dict(), source.state_dict())
        assert model.config.block_slope == model.body.layer1[0].conv1.bn.slope == 1e-6


@pytest.mark.parametrize("key", ["file", "state_dict"])
def test_pretrained_from_the_public_format(tmp_path, key):
    source = small_public(v2=True, filters=True).eval()
    contents = {"model": {f"module.{k}": v for k, v in source.state_dict().items()}}
    torch.save(contents, tmp_path / "a.pth")
    source_of = {"file": str(tmp_path / "a.pth"), "state_dict": contents}
    overlay = {key: source_of[key], "num_classes": CLASSES}
    model = create("tresnet_v2_l", pretrained=True, pretrained_cfg_overlay=overlay).eval()
    x = torch.rand(2, 3, 64, 96)
    torch.testing.assert_close(model(x), source(x), rtol=1e-4, atol=1e-5)
    assert model.config.block_slope == 1e-3


def test_a_checkpoint_path_and_other_classes_with_a_new_head(timms):
    source, path = timms
    model = create(num_classes=CLASSES, checkpoint_path=str(path))
    assert same(model.state_dict(), source.state_dict())
    model = create(path=path, num_classes=9)
    assert model.head.fc.weight.shape == (9, 512)
    assert same(model.body.state_dict(), source.body.state_dict())
    model = create(path=path, num_classes=0).eval()
    x = torch.rand(1, 3, 64, 64)
    assert torch.equal(model(x), source.forward_head(source.forward_features(x), True))


@pytest.mark.parametrize("options", [{"norm": "batchnorm"}, {"jit": True, "impl": "plain"}])
def test_a_checkpoint_of_timms_train_py_with_model_kwargs(tmp_path, options):
    model = trained(create(num_classes=CLASSES, **options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saver = timm.utils.CheckpointSaver(model, optimizer, checkpoint_dir=str(tmp_path))
    saver.save_checkpoint(0, metric=1.0)
    loaded = tresnet.create(weights=tmp_path / "model_best.pth.tar")
    assert same(loaded.state_dict(), model.state_dict())


def test_misfits_are_errors_even_with_a_new_head(timms):
    overlay = {"file": str(timms[1]), "num_classes": CLASSES}
    options = {**SMALL, "layers": (1, 2, 2, 1), "num_classes": 9, "pretrained_cfg_overlay": overlay}
    with pytest.raises(CheckpointError, match=r"a.safetensors does not fit.*missing: body.layer3"):
        timm.create_model("tresnet_m", pretrained=True, **options)


def test_data_config():
    model = timm.create_model("tresnet_m.miil_in1k_448", device="meta")
    config = timm.data.resolve_model_data_config(model)
    assert config == {
        **{"input_size": (3, 448, 448), "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)},
        **{"interpolation": "bilinear", "crop_pct": 1.0, "crop_mode": "squash"},
    }
    model = timm.create_model("tresnet_s", device="meta")
    assert timm.data.resolve_model_data_config(model)["crop_pct"] == 0.875


@pytest.mark.parametrize("name", timm.list_pretrained("tresnet_*") + list_models())
def test_the_configuration_says_what_the_model_does(name):
    model = create(name, device="meta").eval()
    assert (type(model), model.config.variant) == (TResNet, name.partition(".")[0])
    assert model.num_classes == 1000 or "." in name or name == "tresnet_t"
    cfg, state = model.default_cfg, model.state_dict()
    x = torch.empty(1, *cfg["input_size"], device="meta")
    features = model.forward_features(x)
    assert features.shape[2:] == cfg["pool_size"]
    assert model.forward_head(features, pre_logits=True).shape == (1, model.head_hidden_size)
    assert model(x).shape == (1, cfg["num_classes"])
    assert {f"{cfg[key]}.weight" for key in ("first_conv", "classifier")} <= set(state)
    assert create(name, features_only=True, device="meta").default_cfg == cfg


@pytest.mark.parametrize("source", ["local-dir:", "hf-hub:"])
@pytest.mark.parametrize("saved", ["tresnet", "timm"])
def test_a_directory_in_timms_layout(tmp_path, monkeypatch, source, saved):
    """Load config.json and model.safetensors by timm.create_model, which builds our model."""
    model, folder = trained(create(num_classes=CLASSES)).eval(), tmp_path / "layout"
    folder.mkdir()
    save_checkpoint(model, folder / "model.safetensors", format=saved)
    config = {"architecture": "tresnet_m", "num_classes": CLASSES, "model_args": SMALL}
    config["pretrained_cfg"] = {"input_size": [3, 224, 224], "first_conv": "body.conv1.conv"}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(
        _hub, "hf_hub_download", lambda repo_id, filename, **_: str(folder / filename)
    )
    name = folder if source == "local-dir:" else "user/name"
    loaded = timm.create_model(f"{source}{name}", pretrained=True)
    assert same(model.state_dict(), loaded.state_dict())
    assert loaded.config.layers == (1, 2, 1, 1)


def start_plugin(*arguments):
    sys.argv = ["timm_plugin", *arguments]
    runpy.run_module("tresnet.timm_plugin", run_name="__main__")


def test_timms_scripts_see_our_models(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, timm, neighbour\n"
        "model = timm.create_model(sys.argv[1], device='meta')\n"
        "print(__name__, type(model).__module__, sys.argv[1:])\n"
    )
    (tmp_path / "neighbour.py").touch()

    done = run_forked(start_plugin, str(script), "tresnet_m", "--x", folder=tmp_path)
    assert done.stdout == "__main__ tresnet.models.tresnet ['tresnet_m', '--x']\n", done.stderr


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_a_script_that_is_not_there(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["timm_plugin", "."])
    message = "error: expected a script of timm's, got .: there is no such file"
    with pytest.raises(SystemExit, match=message):
        runpy.run_module("tresnet.timm_plugin", run_name="__main__")
