"""Test benchmarks/loaders.py: all loaders give equal images, and their epochs are timed."""

import json
from typing import Any

import pytest
import torch

from benchmarks import loaders
from benchmarks.loaders import Settings, compare_loaders, loaders_in, main, write_jpegs
from tresnet.data.crops import Crops

# timm does not close image files, so the garbage collector does.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


class Clock:
    """Stand-in for a clock, which `Epoch` advances."""

    now = 0.0

    def mark(self):
        return Clock.now

    def seconds(self, begin, end):
        return end - begin


class Epoch:
    """Batches that take 100 s each during warm-up (4 batches), then 0.25 s each."""

    def __init__(self, batches):
        self.batches, self.close = batches, int

    def __iter__(self):
        for number in range(self.batches):
            Clock.now += 100 if number < 4 else 0.25
            yield torch.zeros(2, 3, 4, 4), None


def test_warm_up_is_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(loaders, "HostClock", Clock)
    form = {"batch_size": 2, "input_size": 4, "workers": 2, "rounds": 1, "batches": 4}
    opened = {"a": lambda: Epoch(8), "b": lambda: Epoch(7)}
    settings = Settings(output_dir=tmp_path, **form)
    row, short = compare_loaders(opened, settings, "made up", ["tresnet"], str).rows
    assert row["round_images_per_s"] == [8.0]
    assert "an epoch of 8 batches of 2 images, got 7" in short["error"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("jpegs")
    for split in ("train", "val"):
        write_jpegs(root, split, count=5)
    return root


def contending(folder, split):
    """Open all loaders, with 6 images an epoch from 5 files."""
    size = {"batch_size": 3, "input_size": 32, "workers": 0, "batches": 1, "warmup_batches": 1}
    settings = Settings(split=split, auto_augment="original", **size)
    return [opens() for opens in loaders_in(folder, {}, settings).values()]


def pixels(images):
    return images.render(torch.device("cpu")) if isinstance(images, Crops) else images


def test_all_evaluate_the_same_pictures(folder):
    first, *others = (list(loader) for loader in contending(folder, "val"))
    for batches in others:
        for (x, labels), (y, same) in zip(first, batches, strict=True):
            assert torch.equal(x, pixels(y))
            assert torch.equal(labels, same)
    assert torch.equal(first[0][0][0], first[1][0][2])  # the last image repeats the first


def test_training_crops_at_random(folder):
    for loader in contending(folder, "train"):
        batches = [pixels(images) for images, _ in loader]
        assert [batch.shape for batch in batches] == [(3, 3, 32, 32)] * 2
        assert len({int(image.float().sum() * 100) for batch in batches for image in batch}) == 6


def test_a_comparison_prints_a_table_and_writes_a_record(folder, tmp_path, capsys):
    settings: Any = {"batch_size": 2, "input_size": 16, "workers": 0, "rounds": 1, "batches": 1}
    assert main(Settings(data=folder, warmup_batches=1, output_dir=tmp_path, **settings)) == 0
    assert capsys.readouterr().out.startswith("case ")
    (path,) = tmp_path.glob("bench_loader_cpu_*.json")
    rows = json.loads(path.read_text())["rows"]
    ours = [f"tresnet, {what}" for what in ("crops", "images", "device alone")]
    assert [row["case"] for row in rows] == ["timm", *ours, "torchvision"]
    for row in rows:
        assert row["case"] == "tresnet, crops" or row["batch_bytes"] == 2 * 3 * 16 * 16
