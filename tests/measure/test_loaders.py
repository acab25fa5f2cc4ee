"""Loaders in turns, on a clock that the loaders themselves move."""

import dataclasses
import json

import pytest
import torch

from tresnet.errors import InputError
from tresnet.measure import loaders
from tresnet.measure.loaders import bench_loaders, compare_loaders
from tresnet.measure.settings import LoaderSettings

pytestmark = pytest.mark.usefixtures("quick")

SETTINGS = LoaderSettings(batch_size=2, input_size=4, workers=0, rounds=3, batches=4)


class Clock:
    """Tells the time of `now`."""

    now = 0.0

    def mark(self):
        return Clock.now

    def seconds(self, begin, end):
        return end - begin


class Epoch:
    """Takes 100 s to a warm-up batch, then so many seconds a batch; slower by the visit."""

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


@pytest.fixture(autouse=True)
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


def test_rounds_visit_every_loader_and_time_no_warm_up(tmp_path):
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


def test_what_no_stage_takes_is_transport(tmp_path, monkeypatch):
    monkeypatch.setattr(loaders, "usable_cores", lambda: 9)
    ours = Epoch("a", 0.25, [])
    ours.stages = lambda: {"decode": 0.05, "resize": 0.1}  # of 2 workers / 8 images/s
    (row,) = compared(tmp_path, workers=2, rounds=1, a=ours)
    shares = [row[f"{name}_pct"] for name in ("decode", "resize", "transport")]
    assert shares == pytest.approx([20, 40, 40])
    assert row["note"] == "a worker's time: decode 20 %, resize 40 %, transport 40 %"


@pytest.mark.parametrize("batches", [0, 7])
def test_an_epoch_that_is_too_short_is_no_measurement(batches, tmp_path):
    short, fine = compared(tmp_path, a=Epoch("a", 1.0, [], batches=batches), b=Epoch("b", 1.0, []))
    assert (short["status"], fine["status"]) == ("failed", "ok")
    assert f"an epoch of 8 batches of 2 images, got {batches}" in short["error"]


@pytest.mark.parametrize(("name", "value"), [("warmup_batches", 0), ("workers", -1)])
def test_settings_are_checked(name, value):
    with pytest.raises(InputError, match=f"expected {name} of at least {value + 1}, got {value}"):
        bench_loaders(LoaderSettings(**{name: value}), ["tresnet"], str)
