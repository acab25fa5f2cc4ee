"""Loaders give crops, of which the device renders bytes, one batch ahead of the step."""

import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from tests.engine.runs import ALONE, CPU, assert_same_run, at_calls, resolved
from tests.steps.stand_in import create_step
from tresnet.checkpoints.creation import create
from tresnet.data.crops import Crops, RenderSpec
from tresnet.engine import config as configs
from tresnet.engine.batch_size import MicroBatches
from tresnet.engine.run import create_model, training_step
from tresnet.engine.train import train
from tresnet.errors import DataError
from tresnet.ops.render.rows import OFFSET, make_row
from tresnet.settings import Compute
from tresnet.steps import InferenceStep, TrainingStep
from tresnet.steps.feed import Feed, reads_bytes


def test_floats_are_those_of_the_transform_to_the_bit():
    every = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(2, 3, 16, 16)
    expected = every.float().div(255)
    for channels_last in (False, True):
        compute = Compute(channels_last=channels_last)
        labels = torch.arange(2)
        floats, same = Feed(compute, CPU, keep_bytes=False)(every, labels)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        assert floats.dtype == torch.float32
        assert floats.is_contiguous(memory_format=layout)
        assert torch.equal(floats, expected)
        assert torch.equal(same, labels)
        assert torch.equal(Feed(compute, CPU, keep_bytes=True)(every, labels)[0], every)
        assert not reads_bytes(nn.Conv2d(3, 8, 3), compute), "models of others get floats"


@pytest.mark.parametrize(
    ("changes", "trained", "tested"),
    [
        ({"mixup": 0.0}, torch.uint8, torch.uint8),
        ({"mixup": 0.2}, torch.float32, torch.uint8),
        ({"mixup": 0.0, "cutmix": 1.0}, torch.float32, torch.uint8),
        ({"mixup": 0.0, "channels_last": False}, torch.float32, torch.float32),
    ],
    ids=str,
)
def test_bytes_reach_the_model_where_nothing_needs_floats(tiny, changes, trained, tested):
    config = resolved(tiny(**changes))
    step = training_step(create_model(config, "abc"), config, ALONE, MicroBatches(4, 1, 6))
    testing = InferenceStep(step.eval_model, config.step.compute, CPU)
    images = torch.zeros(2, 3, 12, 12, dtype=torch.uint8)
    assert step.feed.images(images).dtype == trained
    assert testing.feed.images(images).dtype == tested


def test_a_run_on_bytes_is_the_run_on_floats_to_the_bit(tiny, monkeypatch):
    """Bytes are kept in the second epoch, whose images are not mixed."""
    changes = {"mix_off_epochs": 1, "amp": "bf16"}
    config = tiny(name="bytes", affine_degrees=20.0, **changes)
    on_bytes = train(config).run_dir
    monkeypatch.setattr(
        Crops, "render", lambda crops, device, _r=Crops.render: _r(crops, device) / 255
    )
    assert_same_run(on_bytes, train(configs.replace(config, name="floats")).run_dir)


class StandIn:
    """Streams that copy nothing."""

    def copy(self, batch):
        images, labels = batch
        return images.render(CPU) if isinstance(images, Crops) else images, labels

    def hand_over(self, batch):
        pass


def host_batches(count, failure):
    """Batches whose labels are their numbers."""
    for number in range(count):
        yield torch.full((1, 3, 2, 2), number, dtype=torch.uint8), torch.tensor([number])
    raise failure


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_failure_comes_after_all_batches_before_it(monkeypatch, overlaps, count):
    if overlaps:
        monkeypatch.setattr(Feed, "_beside", StandIn())
    batches = Feed(Compute(), CPU, keep_bytes=True).ahead(host_batches(count, DataError("bad")))
    for number in range(count):
        images, labels = next(batches)
        assert (images == number).all()
        assert labels.item() == number
    with pytest.raises(DataError, match="bad"):
        next(batches)


@pytest.mark.gpu
def test_batches_rendered_ahead_are_whole_beside_a_replaying_step():
    """Wrong streams, or memory used again too early, would show other images or other labels."""
    device, spec, batch = torch.device("cuda"), RenderSpec((64, 64), bicubic=False), 32
    generator = np.random.default_rng(0)

    def batches():
        for number in range(40):
            sides = generator.integers(20, 90, (batch, 2))
            crops = [generator.integers(0, 256, (h, w, 3), np.uint8) for h, w in sides]
            rows = np.stack([make_row(crop.shape[:2], spec.size) for crop in crops])
            rows[:, OFFSET] = np.cumsum([0, *(crop.size for crop in crops[:-1])])
            pixels = torch.from_numpy(np.concatenate([crop.ravel() for crop in crops]))
            labels = torch.full((batch,), number % 5)
            hosts.append((Crops(pixels, torch.from_numpy(rows), spec, 4 * 90 * 90 * batch), labels))
            yield replace(hosts[-1][0], pixels=pixels.pin_memory()), labels.pin_memory()

    hosts, used = [], []
    model = create("tresnet_m", num_classes=5, device=device)
    step = create_step(model, Compute(amp="bf16"), device)
    for number, (images, labels) in enumerate(step.feed.ahead(batches()), 1):
        step.backward(images, labels, nn.functional.cross_entropy)
        step.optimizer_step(number)
        used.append((images.clone(), labels.clone()))
    assert step.replayed
    for (crops, expected), (images, labels) in zip(hosts, used, strict=True):
        assert torch.equal(images.cpu(), crops.render(CPU))
        assert torch.equal(labels.cpu(), expected)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_run_one_batch_ahead_is_the_plain_run_to_the_bit(tiny, monkeypatch, accumulate):
    """An epoch has 6 batches; the run is stopped in the middle and resumed."""
    config = tiny(name="plain", accumulate=accumulate)
    expected = train(config).run_dir
    monkeypatch.setattr(Feed, "_beside", StandIn())
    config = configs.replace(config, name="ahead")
    with monkeypatch.context() as patch:
        stop = lambda *_: signal.raise_signal(signal.SIGTERM)  # noqa: E731
        at_calls(patch, TrainingStep, "optimizer_step", {1}, after=stop)
        first = train(config)
    assert first.stopped_by == signal.SIGTERM
    assert_same_run(train(config, resume=first.run_dir).run_dir, expected)
