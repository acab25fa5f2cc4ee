"""Weights without names of classes, whose order is that of timm: each command refuses or maps."""

import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.engine.runs import eval_main, train_main, write_images
from tests.toys import smallest
from tresnet.checkpoints.describe import open_checkpoint
from tresnet.checkpoints.save import save_checkpoint
from tresnet.cli.main import main
from tresnet.data.digits import CLASSES as DIGITS

ORDER = [*DIGITS, "10"]  # timm's; as strings the order is 0, 1, 10, 2, ...
REFUSAL = "either order: 0, 1, 10, 2, 3, 4, 5, 6, 7, 8, 9 (sorted as here and in torchvision), or 0"
RUN = "--recipe digits --input-size 12 --batch-size 4 --ema-decay 0 --lr 1e-12 --epochs 1 --runs ."


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a directory with data, weights with and without names, and a class map."""
    root = tmp_path_factory.mktemp("numbered")
    write_images(root / "set", tuple(ORDER), train=22, val=22)
    torch.manual_seed(0)
    model = smallest(num_classes=11)
    model.pretrained_cfg |= {"input_size": (3, 44, 44), "crop_pct": 1.0}
    save_checkpoint(model, root / "unnamed.safetensors")
    save_checkpoint(model, root / "named.safetensors", metadata={"classes": ORDER})
    (root / "map.txt").write_text("\n".join(ORDER))
    (root / "names.txt").write_text("\n".join(f"n{name}" for name in ORDER))
    (root / "few.txt").write_text("\n".join(ORDER[:9]))
    return root


@pytest.fixture
def common(place, tmp_path, monkeypatch):
    """Change to a directory with the files of `place`, and return options of train and eval."""
    for path in place.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return "--data set --device cpu --workers 0 --no-progress"


def result_of(options):
    assert eval_main(f"{options} --output out.json --overwrite") == 0
    with open("out.json") as file:
        return json.load(file)


def test_evaluation_and_training_name_both_orders_or_take_a_map(common, capsys):
    unnamed, named = (f"--weights {name}.safetensors" for name in ("unnamed", "named"))
    for command in (eval_main, train_main):
        assert command(f"{common} {unnamed}") == 2
        error = capsys.readouterr().err
        assert REFUSAL in error
        assert ("or start a new head by --new-head" in error) == (command is train_main)
        assert command(f"{common} {unnamed} --class-map few.txt") == 2
        assert "9" in capsys.readouterr().err
    expected = result_of(f"{common} {named}")
    assert result_of(f"{common} {unnamed} --class-map map.txt")["loss"] == expected["loss"]
    # The run keeps the head: its weights hardly change at such a rate.
    run = f"{common} {RUN} {unnamed} --crop-pct 1 --input-size 44"
    assert train_main(f"{run} --class-map map.txt --name run") == 0
    printed = capsys.readouterr().out
    assert " 11 classes (0, 1, 2, 3, 4 and 6 more); 4 images per step" in printed
    assert "weights from unnamed.safetensors\n" in printed
    found = open_checkpoint("run/best.safetensors")
    assert found.classes == tuple(ORDER)
    assert found.user["loss"] == pytest.approx(expected["loss"], rel=1e-3)
    assert train_main(f"{run} --new-head --dry-run") == 0


def test_a_teacher_names_both_orders_or_takes_a_map(common, capsys):
    run = f"{common} {RUN} --model tresnet_t --width-factor 0.125 --teacher unnamed.safetensors"
    run = f"{run} --input-size 44 --dry-run"
    assert train_main(run) == 2
    error = capsys.readouterr().err
    assert re.match("error: --teacher .*unnamed.safetensors: the weights have no names", error)
    assert REFUSAL in error
    assert train_main(f"{run} --class-map map.txt") == 0


def test_predict_convert_and_export_take_a_map(common, capsys):
    image = "image.png"
    Image.new("RGB", (44, 44)).save(image)
    for options, names in (
        ("", [f"class {name}" for name in ORDER]),
        ("names.txt", [f"n{i}" for i in ORDER]),
    ):
        mapped = ["--class-map", options] if options else []
        words = ["predict", image, "--weights", "unnamed.safetensors", "--device", "cpu"]
        assert main([*words, "--top-k", "11", "--format", "json", *mapped]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert {one["class"]: one["number"] for one in row["predictions"]} == {
            name: number for number, name in enumerate(names)
        }
    for source, file, expected in (("unnamed", "map", ORDER), ("named", "names", names)):
        target = f"{file}.safetensors"
        words = ["convert", f"{source}.safetensors", target, "--class-map", f"{file}.txt"]
        assert main(words) == 0
        assert open_checkpoint(target).classes == tuple(expected)
    Path("turned.txt").write_text("\n".join(reversed(ORDER)))
    words = ["convert", "named.safetensors", "no.safetensors", "--class-map", "turned.txt"]
    assert main(words) == 2
    assert "states the order 0, 1, 2" in capsys.readouterr().err
    words = ["export", "unnamed.safetensors", "--format", "pt2", "--data", "set"]
    assert main(words) == 2
    assert REFUSAL in capsys.readouterr().err
    assert main([*words, "--class-map", "map.txt"]) == 0
    content = {"tresnet": ""}
    torch.export.load("unnamed.pt2", extra_files=content)
    assert json.loads(content["tresnet"])["classes"] == ORDER
    expected = result_of(f"{common} --weights named.safetensors")["top1"]
    assert f"{expected:.2f} %" in capsys.readouterr().out
