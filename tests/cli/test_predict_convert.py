import dataclasses
import typing

import pytest
import safetensors
import torch
from PIL import Image

from tresnet.checkpoints.creation import create
from tresnet.checkpoints.save import save_checkpoint
from tresnet.checkpoints.weights import describe
from tresnet.cli.main import main as run
from tresnet.cli.predict import Predict, name_classes
from tresnet.models.zoo import build
from tresnet.steps import InferenceCompute

CLASSES = ["zero", "one", "two"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A tresnet_t that says 'two' to everything."""
    torch.manual_seed(0)
    model = build("tresnet_t", num_classes=3)
    with torch.no_grad():
        model.get_parameter("head.fc.weight").zero_()
        model.get_parameter("head.fc.bias").copy_(torch.tensor([0.0, 1.0, 4.0]))
    path = tmp_path_factory.mktemp("weights") / "three.safetensors"
    save_checkpoint(model, path, metadata={"classes": CLASSES})
    return path


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "digit.png"
    Image.new("L", (8, 8), 200).save(path)
    return path


def test_predict_names_the_likeliest_classes_of_each_image(weights, image, capsys):
    assert run(["predict", str(image), str(image), "--weights", str(weights)]) == 0
    assert capsys.readouterr().out == f"{image}: two (93.6 %)\n" * 2
    assert run(["predict", str(image), "--weights", str(weights), "--topk", "5"]) == 0
    assert capsys.readouterr().out == f"{image}: two (93.6 %), one (4.7 %), zero (1.7 %)\n"


def test_predict_agrees_with_the_model(image, tmp_path, capsys):
    """The image is read, resized and scaled as in evaluation."""
    model = build("tresnet_t", num_classes=4).eval()
    path = tmp_path / "random.safetensors"
    save_checkpoint(model, path)
    tensor = torch.full((1, 3, 32, 32), 200 / 255)
    with torch.inference_mode():
        expected = name_classes(model(tensor)[0], None, 4)
    assert run(["predict", str(image), "--weights", str(path), "--topk", "4"]) == 0
    assert capsys.readouterr().out == f"{image}: {expected}\n"


def test_unreadable_images_are_named_and_the_others_predicted(weights, image, tmp_path, capsys):
    broken, missing = tmp_path / "broken.png", tmp_path / "missing.png"
    broken.write_bytes(image.read_bytes()[:40])
    files = [str(broken), str(missing), str(image)]
    assert run(["predict", *files, "--weights", str(weights)]) == 2
    printed = capsys.readouterr()
    assert printed.out == f"{image}: two (93.6 %)\n"
    first, second = printed.err.splitlines()
    assert first.startswith(f"error: expected an image, but {broken} cannot be read")
    assert second.startswith(f"error: expected an image, but {missing} cannot be read")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("IMAGE --weights tresnet_m.miil_in2k", "did you mean 'tresnet_m.miil_in"),
        ("IMAGE --weights missing.safetensors", "missing.safetensors"),
        ("IMAGE --weights WEIGHTS --topk 0", "expected topk of at least 1, got 0"),
        ("IMAGE --weights WEIGHTS --device gpu", "expected a device such as cpu or cuda:0"),
        ("--weights WEIGHTS", "expected at least one image file, got none"),
    ],
)
def test_predict_with_bad_options(arguments, message, weights, image, capsys):
    files = {"IMAGE": str(image), "WEIGHTS": str(weights)}
    assert run(["predict", *(files.get(word, word) for word in arguments.split())]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


@pytest.mark.parametrize(
    "options",
    ["--no-fold", "--pad", "--impl reference", "--dtype bf16", "--amp bf16", "--channels-last"],
)
def test_predict_computes_as_training_and_evaluation_can(options, weights, image, capsys):
    assert run(["predict", str(image), "--weights", str(weights), *options.split()]) == 0
    assert capsys.readouterr().out == f"{image}: two (93.6 %)\n"


def test_predict_has_the_options_of_every_inference():
    for field in dataclasses.fields(InferenceCompute):
        ours = Predict.__dataclass_fields__[field.name]
        theirs = typing.get_type_hints(InferenceCompute)[field.name]
        assert (typing.get_type_hints(Predict)[field.name], ours.default) == (theirs, field.default)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_diverged_predict_nothing(value, image, tmp_path, capsys):
    model = build("tresnet_t", num_classes=3)
    with torch.no_grad():
        model.get_parameter("head.fc.bias")[1] = value
    save_checkpoint(model, tmp_path / "a.pth")
    assert run(["predict", str(image), "--weights", str(tmp_path / "a.pth")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "holds infinities or NaN, in head.fc.bias" in printed.err


@pytest.mark.parametrize("command", ["predict", "convert"])
def test_weights_are_read_once(command, weights, image, tmp_path, monkeypatch, capsys):
    opened = []
    read = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", lambda *a, **k: opened.append(a) or read(*a, **k))
    arguments = {
        "predict": [str(image), "--weights", str(weights)],
        "convert": [str(weights), str(tmp_path / "a.pth")],
    }[command]
    assert run([command, *arguments]) == 0
    assert len(opened) == 1


def test_predict_needs_a_classifier(image, tmp_path, capsys):
    path = tmp_path / "headless.safetensors"
    save_checkpoint(build("tresnet_t", num_classes=0), path)
    assert run(["predict", str(image), "--weights", str(path)]) == 2
    assert "expected weights of a classifier" in capsys.readouterr().err


def test_classes_without_names_have_numbers_and_several_labels_a_probability_each():
    assert name_classes(torch.tensor([0.0, 50.0]), None, 1) == "class 1 (100.0 %)"
    logits = torch.tensor([0.0, 4.0, 4.0])
    assert name_classes(logits, ("a", "b", "c"), 3, several=True) == (
        "b (98.2 %), c (98.2 %), a (50.0 %)"
    )


def test_convert_keeps_weights_and_classes(weights, tmp_path, capsys):
    target = tmp_path / "three.pth"
    assert run(["convert", str(weights), str(target)]) == 0
    assert capsys.readouterr().out == f"{target}: tresnet_t, 3 classes, tresnet format\n"
    assert list(describe(target).classes) == CLASSES
    before, after = create(weights=weights), create(weights=target)
    for name, value in before.state_dict().items():
        assert torch.equal(value, after.state_dict()[name]), name


def test_convert_to_timm(tmp_path, capsys):
    source, target = tmp_path / "ours.safetensors", tmp_path / "timms.safetensors"
    model = build("tresnet_s", num_classes=3, layers=(1, 1, 1, 1))
    save_checkpoint(model, source, metadata={"classes": CLASSES})
    assert run(["convert", str(source), str(target), "--format", "timm"]) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith(", 3 classes, timm format\n")
    assert printed.err == "not kept, timm's format has no place for it: classes\n"
    from safetensors.torch import load_file

    kept = load_file(target)
    assert torch.equal(
        kept["body.conv1.conv.weight"], model.get_parameter("body.conv1.conv.weight")
    )
    assert describe(target).format == "timm"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("three OUT.pth --model tresnet_m", "holds tresnet_t, got name='tresnet_m'"),
        ("three OUT.onnx", "expected a file name ending in"),
        ("three OUT.pth --format timm", "block_size=2"),
        ("three no/OUT.pth", "no does not exist"),
        ("three old.pth", "old.pth exists"),
        ("old.pth OUT.safetensors", "old.pth"),
    ],
)
def test_convert_with_bad_options(arguments, message, weights, tmp_path, capsys):
    old = tmp_path / "old.pth"
    old.write_bytes(b"precious")
    source, target, *options = arguments.split()
    path = weights if source == "three" else old
    assert run(["convert", str(path), str(tmp_path / target), *options]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == [old]
    assert old.read_bytes() == b"precious"
