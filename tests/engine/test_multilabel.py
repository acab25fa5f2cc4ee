"""Several labels an image: metrics against scikit-learn's, training, evaluation, resuming."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.engine.runs import eval_main, train_main
from tests.toys import small
from tresnet.checkpoints.creation import create
from tresnet.checkpoints.describe import open_checkpoint
from tresnet.checkpoints.save import save_checkpoint
from tresnet.engine.evaluate import average_precision, f1_scores

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
    assert f1_scores(predicted, targets) == pytest.approx(expected, abs=1e-12)


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
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


def test_the_recipe_takes_the_variant_of_the_weights(shapes: Path, capsys):
    """Run the first command of docs/examples/many-labels.md, with small weights."""
    weights = shapes.parent / "small.safetensors"
    save_checkpoint(small("tresnet_m"), weights)
    command = f"--recipe multilabel --data {shapes} --weights {weights}"
    small_run = "--batch-size 8 --input-size 32 --workers 0 --device cpu --dry-run"
    assert train_main(f"{command} {small_run}") == 0
    printed = capsys.readouterr().out
    assert '"model": "tresnet_m"' in printed
    assert '"block_size": null' in printed


def test_a_run_logs_saves_and_is_evaluated(shapes: Path, capsys: pytest.CaptureFixture[str]):
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
    assert eval_main([*command, "--device", "cpu"]) == 2
    assert "2 classes, the data 1 (left)" in (error := capsys.readouterr().err)
    assert "list all classes there" in error
    (shapes / "classes.txt").write_text("left\ntop\n")
    assert eval_main([*command, "--device", "cpu", "--output", str(output), "--overwrite"]) == 0
    assert json.loads(output.read_text())["per_class_ap"] == {"left": 100, "top": None}
    (shapes / "val.csv").write_text(tables["val"])
    (shapes / "train.csv").write_text(tables["train"].replace("0.png,0,0", "0.png,1,1"))
    assert train_main(["--resume", str(run)]) == 2
    assert "the training images (their files" in capsys.readouterr().err
