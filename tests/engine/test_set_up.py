"""Time and memory of set-up are no part of a run's rates and peaks, and are logged themselves."""

import json
import re

import pytest
import torch

from tests.measure.test_throughput import FakeClock
from tests.steps.stand_in import StandIn, create_step, network
from tresnet.data.dataset import ImageDataset
from tresnet.engine import loop, set_up
from tresnet.engine.train import train
from tresnet.settings import Compute
from tresnet.steps import TrainingStep
from tresnet.steps.graph import WARMUP_RUNS

MIB = 2**20


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves, of rates as well as of set-up."""
    clock = FakeClock()
    monkeypatch.setattr(set_up.time, "perf_counter", clock.mark)
    meter = loop.ThroughputMeter
    monkeypatch.setattr(loop, "ThroughputMeter", lambda device: meter(device, clock=clock))
    return clock


@pytest.mark.parametrize(
    ("new", "set_up_s"), [({1, 2}, [60.0, None]), ({1, 2, 6, 7}, [90.0, 30.0])], ids=str
)
def test_an_epoch_is_set_up_waiting_for_data_and_training(
    tiny, monkeypatch, capsys, clock, new, set_up_s
):
    """A batch of 4 images loads in 2 s and trains in 2 s; the `new` of 12 train 30 s."""
    load, backward, calls = ImageDataset.__getitem__, TrainingStep.backward, []

    def loading(dataset, index):
        clock.now_s += 0.5
        return load(dataset, index)

    def slow(step, images, *args):
        calls.append(images.shape)
        clock.now_s += 30 if len(calls) in new else 2
        return backward(step, images, *args)

    is_new = property(lambda step: len(calls) in new)
    monkeypatch.setattr(ImageDataset, "__getitem__", loading)
    monkeypatch.setattr(TrainingStep, "backward", slow)
    monkeypatch.setattr(TrainingStep, "setting_up", is_new)
    monkeypatch.setattr(loop, "usable_cores", lambda: 4)
    run_dir = train(tiny(log_interval=1, epochs=2)).run_dir
    rows = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    epochs = [row for row in rows if row["phase"] == "train"]
    assert [row["set_up_s"] for row in epochs] == set_up_s
    assert [row["images_per_s"] for row in epochs] == [1.0, 1.0]
    assert [row["data_wait_pct"] for row in rows[:4]] == [None, None, 50.0, 50.0]
    out = capsys.readouterr().out
    steps = [line for line in out.splitlines() if "epoch 1/2  step" in line]
    assert ["images/s" in line for line in steps] == [False] * 2 + [True] * 4
    assert out.count("set-up took 60.0 s") == len(new) // 2
    assert out.count("data is the bottleneck") == 1


@pytest.mark.parametrize(("accumulate", "graphs"), [(1, 1), (3, 2)])
def test_steps_set_up_until_graphs_are_replayed(accumulate, graphs):
    """With accumulation, one graph is for the first micro-batch and one for the others."""
    model = network()
    step = create_step(model, Compute())
    step.capture_with(StandIn(model))
    setting_up, replayed = [], []
    for number in range(1, 7):
        for part in range(1, accumulate + 1):
            images, labels = torch.rand(4, 3, 8, 8), torch.randint(3, (4,))
            step.backward(
                images, labels, torch.nn.functional.cross_entropy, accumulate, part == accumulate
            )
            setting_up.append(step.setting_up)
            replayed.append(step.replayed)
        step.optimizer_step(number)
    expected = WARMUP_RUNS + graphs
    assert setting_up == [index < expected for index in range(6 * accumulate)]
    assert replayed == [index >= WARMUP_RUNS for index in range(6 * accumulate)]


def test_eager_steps_on_a_cpu_need_no_set_up():
    step = create_step(network(), Compute())
    step.backward(torch.rand(4, 3, 8, 8), torch.arange(4) % 3, torch.nn.functional.cross_entropy)
    assert not step.setting_up


@pytest.mark.gpu
def test_a_run_on_a_gpu_logs_its_set_up(tiny, capsys):
    run_dir = train(tiny(device="cuda", epochs=3)).run_dir
    rows = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    first, *others = (row for row in rows if row["phase"] == "train")
    assert first["set_up_s"] > 0
    assert [row["set_up_s"] for row in others] == [None, None]
    for row in others:
        assert 0 < row["max_allocated_mib"] <= row["reserved_mib"]
    lines = capsys.readouterr().out.splitlines()
    announced, took = (line for line in lines if line.startswith("set-up"))
    assert "searching convolution algorithms, compiling kernels, capturing the step" in announced
    (peak_mib,) = re.findall(r"peak of (\d+) MiB", took)
    assert first["max_allocated_mib"] <= int(peak_mib) + 1
