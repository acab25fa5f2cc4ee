"""benchmarks/loaders.py: the loaders give the same pictures, and take turns on a clock."""

import dataclasses
import json

import pytest
import torch
from PIL import Image

from benchmarks import loaders
from benchmarks.loaders import Settings, compare_loaders, loaders_in, main, write_jpegs

# timm leaves it to the garbage collector to close image files.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

SETTINGS = Settings(batch_size=2, input_size=4, workers=0, rounds=3, batches=4)


class Clock:
    """A clock that tests set by `now`."""

    now = 0.0

    def mark(self):
        return Clock.now

    def seconds(self, begin, end):
        return end - begin


class Epoch:
    """Takes 100 s for a warm-up batch, then `seconds` a batch, more on each visit."""

    def __init__(self, name, seconds, visits, dtype=torch.float32, batches=8):
        self.name, self.seconds, self.visits = name, seconds, visits
        self.images = torch.zeros(2, 3, 4, 4, dtype=dtype)
        self.batches = batches

    def close(self):
        """Nothing runs."""

    def __iter__(self):
        self.visits.append(self.name)
        slower = self.visits.count(self.name)
        for number in range(self.batches):
            Clock.now += 100 if number < 4 else self.seconds * slower
            yield self.images, None


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(loaders, "HostClock", Clock)


def compared(folder, workers=0, rounds=3, **epochs):
    settings = dataclasses.replace(
        SETTINGS, output_dir=folder, shards=folder / "s", workers=workers, rounds=rounds
    )
    opened = {name: lambda epoch=epoch: epoch for name, epoch in epochs.items()}
    outcome = compare_loaders(opened, settings, "made up", ["tresnet"], str)
    recorded = json.loads(outcome.path.read_text())["settings"]
    assert (recorded["data"], recorded["shards"]) == ("made up", "s")
    return outcome.rows


def test_rounds_visit_every_loader_and_time_no_warm_up(tmp_path, clock):
    visits = []
    ours, theirs = compared(
        tmp_path, a=Epoch("a", 0.25, visits, torch.uint8), b=Epoch("b", 0.5, visits)
    )
    assert visits == ["a", "b", "b", "a", "a", "b"]
    assert ours["round_images_per_s"] == [8.0, 4.0, 8 / 3]
    assert (ours["p50_images_per_s"], theirs["p50_images_per_s"]) == (4.0, 2.0)
    assert (ours["ratio_to_first"], theirs["ratio_to_first"]) == (1.0, 0.5)
    assert (ours["dtype"], ours["batch_bytes"]) == ("uint8", 2 * 3 * 4 * 4)
    assert (theirs["dtype"], theirs["batch_bytes"]) == ("float32", 4 * 2 * 3 * 4 * 4)
    (short,) = compared(tmp_path, a=Epoch("a", 1.0, [], batches=7))
    assert "an epoch of 8 batches of 2 images, got 7" in short["error"]


def test_what_no_stage_takes_is_transport(tmp_path, monkeypatch, clock):
    monkeypatch.setattr(loaders, "usable_cores", lambda: 9)
    ours = Epoch("a", 0.25, [])
    ours.stages = lambda: {"decode": 0.05, "resize": 0.1}  # of 2 workers / 8 images/s
    (row,) = compared(tmp_path, workers=2, rounds=1, a=ours)
    shares = [row[f"{name}_pct"] for name in ("decode", "resize", "transport")]
    assert shares == pytest.approx([20, 40, 40])
    assert row["note"] == "a worker's time: decode 20 %, resize 40 %, transport 40 %"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("jpegs")
    for split in ("train", "val"):
        write_jpegs(root, split, count=5)
    return root


def contending(folder, split):
    """Open all loaders but DALI's, which rounds, on 5 files for 6 images: one is read twice."""
    settings = Settings(
        split=split, batch_size=3, input_size=32, workers=0, batches=1, warmup_batches=1
    )
    opened = loaders_in(folder, {}, settings)
    return [opens() for name, opens in opened.items() if not name.startswith("DALI")]


def test_all_evaluate_the_same_pictures(folder):
    for file in (folder / "val").rglob("*.jpg"):
        assert 30_000 < file.stat().st_size < 90_000  # as a photograph
        with Image.open(file) as image:
            assert (image.size, image.mode) == (loaders.JPEG_SIZE, "RGB")
    dtypes = [torch.uint8, torch.float32] * 2 + [torch.uint8]
    ours, *others = (list(loader) for loader in contending(folder, "val"))
    for batches, dtype in zip(others, dtypes[1:], strict=True):
        for (x, labels), (y, same) in zip(ours, batches, strict=True):
            assert y.dtype == dtype
            assert torch.equal(x if dtype == torch.uint8 else x.float() / 255, y)
            assert torch.equal(labels, same)
    assert torch.equal(ours[0][0][0], ours[1][0][2])  # the first again, as the last


def test_all_crop_at_random_in_training(folder):
    for loader in contending(folder, "train"):
        batches = [images for images, _ in loader]
        assert [batch.shape for batch in batches] == [(3, 3, 32, 32)] * 2
        assert len({int(image.float().sum() * 100) for batch in batches for image in batch}) == 6


def test_the_time_of_a_training_image_is_split_into_stages(folder):
    ours, floats, *_ = contending(folder, "train")
    torch.manual_seed(7)
    stages = ours.stages()
    assert torch.initial_seed() == 7
    assert set(stages) == {"read", "decode", "resize", "augment"}
    assert min(stages.values()) > 0
    assert floats.stages() == {}


def test_a_comparison_prints_a_table_and_writes_a_record(folder, tmp_path, capsys):
    settings = {"batch_size": 2, "input_size": 16, "workers": 0, "rounds": 2, "batches": 1}
    assert main(Settings(data=folder, warmup_batches=1, output_dir=tmp_path, **settings)) == 0
    assert capsys.readouterr().out.startswith("case ")
    (path,) = tmp_path.glob("bench_loader_cpu_*.json")
    record = json.loads(path.read_text())
    assert record["settings"]["data"] == folder.name
    rows = [row for row in record["rows"] if not row["case"].startswith("DALI")]
    names = ("tresnet, uint8", "tresnet, float", "timm, uint8", "timm, float")
    assert [row["case"] for row in rows] == [*names, "torchvision, uint8"]
    sizes = [2 * 3 * 16 * 16 * size for size in (1, 4, 1, 4, 1)]
    assert [row["batch_bytes"] for row in rows] == sizes
