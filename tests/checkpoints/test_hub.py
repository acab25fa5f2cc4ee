"""Weights pushed and read in timm's layout, in a directory or on a hub; and what fails."""

import json
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import timm
import timm.models.tresnet
import torch
from PIL import Image
from timm.models._hub import save_for_hf

import tresnet
from tests.checkpoints.conftest import REPO
from tests.toys import LAYERS, same, small, trained
from tresnet.checkpoints.describe import open_checkpoint
from tresnet.checkpoints.locate import from_layout
from tresnet.checkpoints.save import save_checkpoint
from tresnet.cli.main import main as run
from tresnet.errors import CheckpointError

HUB = f"hf-hub:{REPO}"
CLASSES = list("abcde")
FACTS = {"top1": 81.5, "top5": "no number", "data": "flowers"}


@pytest.fixture(autouse=True)
def plain_timm(monkeypatch):
    """timm's own models, should another test have registered ours in their place."""
    for name in [name for name in vars(timm.models.tresnet) if name.startswith("tresnet_")]:
        theirs = getattr(timm.models.tresnet, name)
        monkeypatch.setitem(timm.models._registry._model_entrypoints, name, theirs)


@pytest.fixture
def mine(tmp_path):
    """A small model and its file: (model, path)."""
    model = trained(small()).eval()
    path = tmp_path / "mine.safetensors"
    save_checkpoint(model, path, metadata={"classes": CLASSES, **FACTS})
    return model, path


@pytest.fixture
def pushed(hub, mine):
    assert run(["push", str(mine[1]), HUB, "--license", "mit"]) == 0
    return hub, mine[0]


def test_what_is_pushed_is_read_by_us_and_by_plain_timm(pushed):
    hub, model = pushed
    assert set(hub.repos[REPO]) == {"README.md", "config.json", "model.safetensors"}
    assert same(tresnet.create(weights=HUB).state_dict(), model.state_dict())
    theirs: Any = timm.create_model(HUB, pretrained=True).eval()
    assert type(theirs).__module__ == "timm.models.tresnet"
    x = torch.rand(2, 3, 64, 96)
    torch.testing.assert_close(theirs(x), model(x), rtol=1e-5, atol=1e-5)
    assert theirs.pretrained_cfg["license"] == "mit"
    assert theirs.pretrained_cfg["label_names"] == CLASSES
    hub.fault = "offline"  # the cache suffices
    assert open_checkpoint(HUB).classes == tuple(CLASSES)
    config = json.loads(hub.repos[REPO]["config.json"])
    assert config["num_classes"] == len(CLASSES)
    assert "num_classes" not in config["model_args"]  # transformers would pass it twice
    card = hub.repos[REPO]["README.md"].decode()
    assert huggingface_hub.ModelCard(card).data.to_dict()["license"] == "mit"
    assert "pixels in [0, 1], without mean and deviation:\n" in card
    assert "top-1 81.50 % on val of flowers, measured by the run that" in card
    assert f'timm.create_model("{HUB}", pretrained=True)' in card
    assert "timm_plugin" not in card


def test_a_new_directory_is_written(mine, tmp_path, capsys):
    model, path = mine
    target = tmp_path / "out"
    assert run(["push", str(path), str(target)]) == 2
    assert "expected a licence for weights of your own" in capsys.readouterr().err
    arguments = ["push", str(path), str(target), "--license", "mit"]
    assert run(arguments) == 0
    x = torch.rand(2, 3, 64, 64)
    theirs = timm.create_model(f"local-dir:{target}", pretrained=True).eval()
    torch.testing.assert_close(theirs(x), model(x), rtol=1e-5, atol=1e-5)
    assert run(arguments) == 2
    assert f"expected a new directory, but {target} exists" in capsys.readouterr().err
    assert open_checkpoint(target).user["top1"] == 81.5
    bare = tmp_path / "bare.safetensors"
    tresnet.save_checkpoint(model, bare)
    assert run(["push", str(bare), str(tmp_path / "bare"), "--license", "mit"]) == 0
    assert (tmp_path / "bare" / "README.md").read_text().count("\n\nNot known.\n") == 2


@pytest.mark.parametrize("license", ["mit\n", " MIT", "apache-2.0\nother: 5"])
def test_a_licence_is_written_in_one_spelling(license, mine, tmp_path):
    code = run(["push", str(mine[1]), str(tmp_path / "out"), "--license", license])
    assert code == (2 if "other" in license else 0)
    if code == 0:
        card = (tmp_path / "out" / "README.md").read_text()
        assert huggingface_hub.ModelCard(card).data.to_dict()["license"] == "mit"


def test_pipelines_of_transformers_score_many_labels_as_we_do(mine, tmp_path):
    """Without its `problem_type`, config.json means a softmax for them."""
    transformers = pytest.importorskip("transformers")
    path, target = tmp_path / "many.safetensors", tmp_path / "many"
    save_checkpoint(mine[0], path, metadata={"classes": CLASSES, "labels": "multi"})
    assert run(["push", str(path), str(target), "--license", "mit"]) == 0
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (224, 224, 3), np.uint8))
    pipeline = transformers.pipeline("image-classification", str(target), top_k=len(CLASSES))
    scores = {row["label"]: row["score"] for row in pipeline(image)}
    (ours,) = tresnet.predict(image, weights=target, top_k=len(CLASSES))
    assert scores == pytest.approx(dict(zip(ours.classes, ours.probabilities, strict=True)), 1e-3)


def test_weights_of_a_run_say_how_they_were_trained(mine, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    mine[1].rename(folder / "best.safetensors")
    (folder / "config.json").write_text('{"recipe": "finetune", "data": {"data": "/home/me/f"}}')
    (folder / "log.jsonl").write_text('{"epoch": 9, "step": 90, "elapsed_s": 61.2}\n')
    arguments = ["push", str(folder / "best.safetensors"), str(tmp_path / "out"), "--license=mit"]
    environment = {"device": {"type": "cpu"}, "packages": {"torch": "2.15.0"}, "git": None}
    for damaged in ("[]", "[5]", "{"):
        (folder / "environment.json").write_text(damaged)
        assert run(arguments) == 2
        assert f"expected the files of a run in {folder} (" in capsys.readouterr().err
    (folder / "environment.json").write_text(json.dumps([environment]))
    assert run(arguments) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "9 epochs, 90 optimizer steps, 61 s, on cpu with PyTorch 2.15.0" in card
    assert '"recipe": "finetune"' in card
    assert "/home/me" not in card


def test_digits_need_the_plugin_and_bring_their_classes(tmp_path):
    target = tmp_path / "digits"
    assert run(["push", "tresnet_t.digits", str(target)]) == 0
    card = (target / "README.md").read_text()
    assert "import tresnet.timm_plugin" in card
    assert "license: apache-2.0" in card
    ours = tresnet.create(weights=target).eval()
    assert same(ours.state_dict(), tresnet.create(weights="tresnet_t.digits").state_dict())
    assert open_checkpoint(target).classes == tuple("0123456789")


def test_imagenets_names_travel_with_the_tag(tmp_path):
    """timm's own repositories name no classes: the table of published weights does."""
    save_checkpoint(small(num_classes=1000), tmp_path / "model.safetensors", format="timm")
    config = {"architecture": "tresnet_m", "pretrained_cfg": {"tag": "miil_in1k"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    info: Any = open_checkpoint(tmp_path)
    assert (info.classes[1], info.descriptions[1]) == ("n01443537", "goldfish, Carassius auratus")
    names = list(info.classes)
    for stated, words in ((names, info.descriptions), ([*reversed(names)], None)):
        config["label_names"] = stated
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = open_checkpoint(tmp_path)
        assert (found.classes, found.descriptions) == (tuple(stated), words)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("hash", r"is not the published hf-hub:user/name: expected sha256 .* damaged"),
        ("no repository", r"could not get hf-hub:user/name \(RepositoryNotFoundError"),
        ("no weights", r"expected model.safetensors or pytorch_model.bin in hf-hub:user/name"),
    ],
)
def test_what_cannot_be_had_is_said(fault, message, hub):
    hub.fault, hub.repos = fault, {REPO: {"model.safetensors": b"x", "config.json": b"{}"}}
    if fault == "no repository":
        hub.repos.clear()
    if fault == "no weights":
        del hub.repos[REPO]["model.safetensors"]
    with pytest.raises(CheckpointError, match=message):
        tresnet.create(weights=HUB)


def test_names_are_of_the_weights_commit(pushed):
    assert from_layout(HUB)[1] is not None
    assert pushed[0].downloads == [("model.safetensors", None), ("config.json", pushed[0].commit)]


def test_a_hub_that_refuses_is_named(hub, mine, capsys):
    hub.fault = "refused"
    assert run(["push", str(mine[1]), HUB, "--license", "mit"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: could not push to {HUB} (HfHubHTTPError: ")
    assert "writing needs a token, in the variable HF_TOKEN" in error
    assert not hub.repos


ARGS = {"layers": LAYERS, "width_factor": 0.25, "global_pool": "max", "drop_rate": 0.25}
CFG = {"input_size": [3, 160, 160], "crop_pct": 0.9, "interpolation": "bicubic"}
NAMES = ["cat", "dog", "owl"]


@pytest.fixture
def layout(tmp_path):
    """(the model, a directory that timm itself wrote)."""
    model = timm.models.tresnet.tresnet_m(num_classes=3, **ARGS).eval()
    model.pretrained_cfg = {**model.pretrained_cfg, **CFG}
    folder, options = tmp_path / "layout", {"model_args": ARGS, "safe_serialization": "both"}
    save_for_hf(model, folder, {"label_names": NAMES}, **options)
    return model, folder


@pytest.mark.parametrize("source", ["{}", "local-dir:{}", HUB])
def test_what_timm_wrote_is_read_with_its_names_sizes_and_options(layout, hub, source):
    model, folder = layout
    if source == HUB:  # a repository of older times
        (folder / "model.safetensors").unlink()
    hub.repos[REPO] = {path.name: path.read_bytes() for path in folder.iterdir()}
    name = source.format(folder)
    found = tresnet.create(weights=name).eval()
    x = torch.rand(2, 3, 64, 64)
    assert torch.equal(found(x), model(x))
    assert (found.config.global_pool, found.config.drop_rate) == ("max", 0.25)
    assert tresnet.create(weights=name, drop_rate=0.0).config.drop_rate == 0
    info = open_checkpoint(name)
    assert (info.name, info.config.variant, info.classes) == (name, "tresnet_m", tuple(NAMES))
    cfg = info.pretrained_cfg
    assert (cfg["input_size"], cfg["crop_pct"]) == ((3, 160, 160), 0.9)
    assert found.pretrained_cfg["interpolation"] == "bicubic"


def test_ours_in_the_layout_speak_for_themselves(mine, tmp_path):
    mine[1].rename(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"label_names": ["other", "names", "here"]}))
    assert open_checkpoint(tmp_path).classes == tuple(CLASSES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"timm's config.json in .* \(JSONDecodeError\): Expecting property name"),
        ('{"label_names": ["one"]}', "names of 3 classes, got 1"),
        ('{"pretrained_cfg": {"input_size": [1, 9, 9]}}', r"expected input_size \(3, height"),
        ('{"label_names": {"0": "a", "1": "b", "10": "c"}}', r"\(KeyError\): '2'"),
        ('{"model_args": {"act_layer": "relu"}}', "unknown argument of a model 'act_layer'"),
        ('{"model_args": {"block_size": 2.5}}', "block_size: expected a valid integer, got 2.5"),
        ('{"model_args": {"num_classes": 4}}', r"head\.fc"),
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


def test_what_is_missing_is_said(layout, tmp_path):
    with pytest.raises(CheckpointError, match=r"model\.safetensors or pytorch_model\.bin in .*nei"):
        tresnet.create(weights=f"local-dir:{tmp_path}")
    (layout[1] / "config.json").write_text('{"crop_pct": null}')
    assert open_checkpoint(layout[1]).pretrained_cfg["crop_pct"] == 0.875
    (layout[1] / "config.json").unlink()
    assert open_checkpoint(layout[1]).classes is None
