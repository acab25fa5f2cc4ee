"""Several labels an image: metrics against scikit-learn's, training, evaluation, resuming."""

import json
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from PIL import Image

import tresnet
from tests.engine.runs import eval_main, train_main
from tests.toys import small
from tresnet.checkpoints.creation import create
from tresnet.checkpoints.describe import open_checkpoint
from tresnet.checkpoints.save import save_checkpoint
from tresnet.cli.main import main
from tresnet.engine.evaluate import average_precision, best_threshold, f1_scores, label_counts

metrics = pytest.importorskip("sklearn.metrics")


@pytest.mark.parametrize("levels", [3, 10, 10_000])
def test_average_precision_is_scikit_learns(levels: int):
    generator = torch.Generator().manual_seed(levels)
    for _ in range(20):
        scores = torch.randint(levels, (57,), generator=generator) / levels
        targets = (torch.rand(57, generator=generator) < 0.3).float()
        targets[0] = 1
        expected = metrics.average_precision_score(targets.numpy(), scores.numpy())
        assert average_precision(scores, targets) == pytest.approx(expected, abs=1e-12)
    assert average_precision(scores[:5], torch.zeros(5)) is None  # nobody has the class
    assert average_precision(torch.rand(5), torch.ones(5)) == 1


def test_f1_is_scikit_learns_over_the_classes_that_images_have():
    generator = torch.Generator().manual_seed(0)
    predicted, targets = (torch.rand(40, 6, generator=generator) < 0.3 for _ in range(2))
    targets[:, :2] = predicted[:, 0] = False
    pair = (targets.numpy(), predicted.numpy())
    micro = metrics.f1_score(*pair, average="micro")
    expected = micro, metrics.f1_score(*pair, average="macro", labels=range(2, 6))
    assert f1_scores(label_counts(predicted, targets)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("levels", [3, 10, 10_000])
def test_thresholds_have_the_best_f1_of_scikit_learns_curve(levels):
    generator = torch.Generator().manual_seed(levels)
    for _ in range(20):
        scores = (torch.randint(levels, (57,), generator=generator) + 1) / (levels + 1)
        targets = (torch.rand(57, generator=generator) < 0.3).float()
        targets[0] = 1
        found = best_threshold(scores.double(), targets, 0.5)
        precision, recall, at = metrics.precision_recall_curve(targets.numpy(), scores.numpy())
        f1 = (2 * precision * recall / np.maximum(precision + recall, 1e-12))[:-1]
        predicted = (scores.double() >= found).numpy()
        assert metrics.f1_score(targets.numpy(), predicted) == pytest.approx(f1.max(), abs=1e-12)
        lowest = float(at[np.isclose(f1, f1.max(), atol=1e-12)].min())
        assert found < lowest == pytest.approx(found, abs=1.0001e-4)
    assert best_threshold(scores.double(), torch.zeros(57), 0.25) == 0.25


def test_thresholds_are_found_stored_and_used(shapes, capsys):
    """Follow them from eval.py to predict, to an exported file and to a pushed directory."""
    torch.manual_seed(0)
    model = small("tresnet_t", num_classes=2)
    model.pretrained_cfg |= {"input_size": (3, 32, 32), "crop_pct": 1.0}
    with torch.no_grad():
        model.get_parameter("head.fc.weight").normal_(std=0.3)
    path = shapes.parent / "many.safetensors"
    save_checkpoint(model, path, metadata={"labels": "multi", "classes": ["left", "top"]})
    common = ["--data", str(shapes), "--weights", str(path), "--workers", "0", "--device", "cpu"]
    output, tables = shapes.parent / "found.json", shapes.parent / "tables"
    found = ["--find-thresholds", "--output", str(output), "--per-class", str(tables)]
    assert eval_main([*common, *found]) == 0
    result = json.loads(output.read_text())
    stored = open_checkpoint(path).user["threshold"]
    assert result["threshold"] == dict(zip(("left", "top"), stored, strict=True))
    assert f", threshold {stored[1]:.4g}: top\n" in capsys.readouterr().out
    assert open_checkpoint(path).user["labels"] == "multi"
    paths = [str(shapes / "val" / f"{index}.png") for index in range(9)]
    every = tresnet.predict(paths, weights=path, top_k=2)
    chances = np.array([[dict(zip(p.classes, p.probabilities, strict=True))[n] for n in
        ("left", "top")] for p in every])  # fmt: skip
    expected = [
        {name for name, is_there in zip(("left", "top"), row, strict=True) if is_there}
        for row in chances >= np.array(stored)
    ]
    assert [set(p.classes) for p in tresnet.predict(paths, weights=path)] == expected
    targets = np.array([[i % 2, i // 2 % 2] for i in range(9)])
    f1 = metrics.f1_score(targets, chances >= np.array(stored), average="macro")
    assert result["f1_macro"] == pytest.approx(100 * f1)
    for label in (0, 1):
        curve = metrics.precision_recall_curve(targets[:, label], chances[:, label])
        best = (2 * curve[0] * curve[1] / np.maximum(curve[0] + curve[1], 1e-12)).max()
        own = metrics.f1_score(targets[:, label], chances[:, label] >= stored[label])
        assert own == pytest.approx(best)
    again = shapes.parent / "again.json"
    assert eval_main([*common, "--output", str(again)]) == 0
    assert json.loads(again.read_text())["f1_macro"] == result["f1_macro"]
    assert main(["push", str(path), str(shapes.parent / "pushed"), "--license", "mit"]) == 0
    config = json.loads((shapes.parent / "pushed" / "config.json").read_text())
    assert config["threshold"] == stored
    if find_spec("onnxruntime"):
        exported = shapes.parent / "many.onnx"
        assert main(["export", str(path), "--format", "onnx", "--output", str(exported)]) == 0
        same = tresnet.predict(paths, weights=exported, runtime="onnx")
        assert [set(p.classes) for p in same] == expected


def test_finding_thresholds_keeps_the_dtype_of_the_weights(shapes):
    path = shapes.parent / "half.safetensors"
    metadata = {"labels": "multi", "classes": ["left", "top"]}
    save_checkpoint(small("tresnet_t", num_classes=2).half(), path, metadata=metadata)
    command = f"--data {shapes} --weights {path} --workers 0 --device cpu --find-thresholds"
    assert eval_main(command) == 0
    found = open_checkpoint(path)
    assert "threshold" in found.user
    floats = [tensor for tensor in found.tensors.values() if tensor.is_floating_point()]
    assert {tensor.dtype for tensor in floats} == {torch.float16}


def test_thresholds_are_stored_only_where_they_can_be(shapes, capsys):
    path = shapes.parent / "one.safetensors"
    save_checkpoint(small("tresnet_t", num_classes=2), path, metadata={"classes": ["left", "top"]})
    common = f"--data {shapes} --workers 0 --device cpu --find-thresholds --weights"
    assert eval_main(f"{common} {path}") == 2
    assert "expected weights of many labels" in capsys.readouterr().err
    save_checkpoint(small("tresnet_m", num_classes=2), path.with_suffix(".pth"), format="timm")
    assert eval_main(f"{common} {path.with_suffix('.pth')} --labels multi") == 2
    assert "make one by tresnet convert" in capsys.readouterr().err


@pytest.fixture
def shapes(tmp_path):
    """Images with a bright left half, a bright top half, both or neither."""
    root = tmp_path / "shapes"
    generator = np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 9)):
        (root / split).mkdir(parents=True)
        lines = ["image,left,top"]
        for index in range(count):
            left, top = index % 2, index // 2 % 2
            pixels = generator.integers(0, 60, (32, 32))
            pixels[:, :16] += 120 * left
            pixels[:16] += 60 * top
            name = f"{split}/{index}.png"
            Image.fromarray(pixels.astype(np.uint8)).save(root / name)
            lines.append(f"{name},{left},{top}")
        (root / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return root


def test_the_recipe_takes_the_variant_of_the_weights(shapes, capsys):
    """Run the first command of docs/examples/many-labels.md, with small weights."""
    weights = shapes.parent / "small.safetensors"
    save_checkpoint(small("tresnet_m"), weights)
    command = f"--recipe multilabel --data {shapes} --weights {weights}"
    small_run = "--batch-size 8 --input-size 32 --workers 0 --device cpu --dry-run"
    assert train_main(f"{command} {small_run}") == 0
    printed = capsys.readouterr().out
    assert '"model": "tresnet_m"' in printed
    assert '"block_size": null' in printed


def test_a_run_logs_saves_and_is_evaluated(shapes, capsys):
    options = f"""--recipe digits-multilabel --data {shapes} --batch-size 8 --epochs 2
        --input-size 32 --head group_attention --head-groups 1 1 --head-channels 8
        --layers 1 1 1 1 --device cpu --runs {shapes.parent / "runs"} --name run --no-progress
        --threshold 0.3"""
    assert train_main(options.split()) == 0
    run = shapes.parent / "runs" / "run"
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert {row["phase"] for row in rows} == {"initial", "model", "train", "final"}
    assert all(0 <= row["val_map"] <= 100 for row in rows if row["phase"] in ("train", "final"))
    assert all(row["val_top1"] is None and row["accuracy"] is None for row in rows)
    info = open_checkpoint(run / "best.safetensors")
    assert (info.classes, info.user["labels"]) == (("left", "top"), "multi")
    assert info.config.head_groups == (1, 1)
    output = shapes.parent / "result.json"
    command = ["--data", str(shapes), "--weights", str(run / "best.safetensors"), "--workers", "0"]
    assert eval_main([*command, "--device", "cpu", "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert result["map"] == pytest.approx(info.user["map"], abs=1e-9)
    assert result["images"] == 9
    assert list(result["per_class_ap"]) == ["left", "top"]
    assert result["options"]["threshold"] == result["threshold"] == 0.3
    printed = capsys.readouterr().out
    assert f"average precision {result['per_class_ap']['top']:.2f} %: top\n" in printed
    assert "mAP" in printed
    assert eval_main([*command, "--device", "cpu", "--threshold", "0.9"]) == 0
    assert " at 0.9," in capsys.readouterr().out
    same = shapes.parent / "without_threshold.safetensors"
    stated = {"labels": "multi", "classes": ["left", "top"], "threshold": None}
    save_checkpoint(create(weights=info), same, metadata=stated)
    assert eval_main([*command, "--device", "cpu", "--weights", str(same)]) == 0
    assert " at 0.5," in capsys.readouterr().out
    tables = {name: (shapes / f"{name}.csv").read_text() for name in ("train", "val")}
    (shapes / "val.csv").write_text("image,labels\nval/1.png,left\n")
    assert eval_main([*command, "--device", "cpu", "--output", str(output), "--overwrite"]) == 0
    assert "1 classes (left; labels split at ';')\nthe data have 1 of" in capsys.readouterr().out
    assert json.loads(output.read_text())["per_class_ap"] == {"left": 100, "top": None}
    (shapes / "val.csv").write_text(tables["val"])
    (shapes / "train.csv").write_text(tables["train"].replace("0.png,0,0", "0.png,1,1"))
    assert train_main(["--resume", str(run)]) == 2
    assert "the training images (their files" in capsys.readouterr().err
