"""Loaders give crops, of which the device renders bytes, one batch ahead of the step."""

import signal
from unittest.mock import MagicMock, call

import pytest
import torch
from torch import nn

from tests.engine.runs import ALONE, CPU, assert_same_run
from tresnet.data import crops as arenas
from tresnet.data.crops import Crops, RenderSpec
from tresnet.engine import config as configs
from tresnet.engine import splits as run_splits
from tresnet.engine.batch_size import MicroBatches
from tresnet.engine.resolve import resolve
from tresnet.engine.run import create_model, create_step
from tresnet.engine.train import train
from tresnet.errors import DataError
from tresnet.settings import Compute
from tresnet.steps import InferenceStep, TrainingStep
from tresnet.steps import feed as feeds
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
    config = resolve(tiny(**changes), CPU)
    splits = run_splits.open_splits(config, ALONE)
    train_loader, val_loader = (
        run_splits.open_loader(config.data, split, 4, ALONE, training=split is splits.train)
        for split in (splits.train, splits.val)
    )
    step = create_step(create_model(config, splits.classes), config, ALONE, MicroBatches(4, 1, 6))
    testing = InferenceStep(step.eval_model, config.compute, CPU)
    for loader, feed, dtype in (
        (train_loader, step.feed, trained),
        (val_loader, testing.feed, tested),
    ):
        crops, labels = next(iter(loader))
        images, _ = feed(crops, labels)
        assert images.shape == (4, 3, 12, 12)
        assert images.dtype == dtype


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
    """Streams that copy nothing; `calls` is the order in which batches are used."""

    def __init__(self, calls):
        self.calls = calls

    def copy(self, batch):
        self.calls.append(("copy", *batch[1].tolist()))
        images, labels = batch
        return images.render(CPU) if isinstance(images, Crops) else images, labels

    def hand_over(self, batch):
        self.calls.append(("hand over", *batch[1].tolist()))


def plain_feed():
    return Feed(Compute(), CPU, keep_bytes=True)


def host_batches(count, calls=None, failure=None):
    """Batches whose labels are their numbers."""
    for number in range(count):
        if calls is not None:
            calls.append(("load", number))
        yield torch.full((1, 3, 2, 2), number, dtype=torch.uint8), torch.tensor([number])
    if failure is not None:
        raise failure


def test_each_batch_is_copied_before_the_one_before_it_is_used(monkeypatch):
    calls = []
    monkeypatch.setattr(feeds, "copy_stream", lambda device: StandIn(calls))
    for images, labels in plain_feed().ahead(host_batches(3, calls)):
        calls.append(("use", *labels.tolist()))
        assert (images == labels).all()
    assert calls == [
        ("load", 0), ("copy", 0), ("hand over", 0),
        ("load", 1), ("copy", 1), ("use", 0), ("hand over", 1),
        ("load", 2), ("copy", 2), ("use", 1), ("hand over", 2), ("use", 2),
    ]  # fmt: skip


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_failure_comes_after_all_batches_before_it(monkeypatch, overlaps, count):
    if overlaps:
        monkeypatch.setattr(feeds, "copy_stream", lambda device: StandIn([]))
    batches = plain_feed().ahead(host_batches(count, failure=DataError("bad")))
    for number in range(count):
        assert next(batches)[1].item() == number
    with pytest.raises(DataError, match="bad"):
        next(batches)


def test_copies_run_beside_the_current_stream_which_waits_for_them(monkeypatch):
    """The memory of a copy is used again only after the work of the current stream."""
    cuda, batch = MagicMock(), (MagicMock(), MagicMock())
    for name in ("Stream", "stream", "current_stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    device = torch.device("cuda", 1)
    stream = feeds.copy_stream(device)
    assert feeds.copy_stream(CPU) is None
    for name, tensor in zip(("images", "labels"), batch, strict=True):
        cuda.attach_mock(tensor, name)
    copies = stream.copy(batch)
    stream.hand_over(copies)
    own, current = cuda.Stream.return_value, cuda.current_stream.return_value
    handed = current.record_event.return_value
    handed.synchronize.assert_not_called()
    assert cuda.mock_calls == [
        call.Stream(device), call.stream(own), call.stream().__enter__(),
        call.images.to(device, non_blocking=True), call.labels.to(device, non_blocking=True),
        call.stream().__exit__(None, None, None),
        call.current_stream(device), call.current_stream().wait_stream(own),
        call.Event(blocking=True), call.current_stream().record_event(cuda.Event.return_value),
        call.images.to().record_stream(current), call.labels.to().record_stream(current),
    ]  # fmt: skip
    stream.hand_over(copies)  # the host is at most one step ahead
    handed.synchronize.assert_called_once_with()


def test_all_epochs_have_one_stream(monkeypatch):
    made = []
    monkeypatch.setattr(feeds, "copy_stream", lambda device: made.append(StandIn([])) or made[-1])
    feed = plain_feed()
    for _ in range(3):
        assert len([*feed.ahead(host_batches(2))]) == 2
    assert len(made) == 1


def test_crops_are_copied_and_rendered_beside_the_current_stream(monkeypatch):
    """Every batch takes as many bytes on the GPU; no work is outside of the stream's context."""
    calls = []

    class Context:
        def __enter__(self):
            calls.append("enter")

        def __exit__(self, *_):
            calls.append("exit")

    def arena(count, dtype, device, _empty=torch.empty):
        calls.append(("arena", count))
        return _empty(count, dtype=dtype)

    def render(pixels, rows, size, bicubic):
        calls.append(("render", pixels.tolist()))
        return torch.zeros(len(rows), 3, *size, dtype=torch.uint8)

    monkeypatch.setattr(torch.cuda, "Stream", MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: Context())
    monkeypatch.setattr(arenas, "runs_kernels", lambda device: True)
    monkeypatch.setattr(arenas, "render", render)
    monkeypatch.setattr(torch, "empty", arena)
    stream = feeds.CopyStream(CPU)
    for pixels in ([1, 2, 3], [4, 5, 6, 7, 8, 9]):
        rows = torch.zeros(len(pixels) // 3, 13, dtype=torch.float64)
        crops = Crops(torch.tensor(pixels, dtype=torch.uint8), rows, RenderSpec((1, 1), False), 24)
        images, _ = stream.copy((crops, torch.zeros(1)))
        assert images.shape == (len(rows), 3, 1, 1)
    assert calls == [
        "enter", ("arena", 24), ("render", [1, 2, 3]), "exit",
        "enter", ("arena", 24), ("render", [4, 5, 6, 7, 8, 9]), "exit",
    ]  # fmt: skip


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_run_one_batch_ahead_is_the_plain_run_to_the_bit(tiny, monkeypatch, accumulate):
    """An epoch has 6 batches; the run is stopped in the middle and resumed."""
    config = tiny(name="plain", accumulate=accumulate)
    expected, calls = train(config).run_dir, []
    monkeypatch.setattr(feeds, "copy_stream", lambda device: StandIn(calls))
    step = TrainingStep.optimizer_step

    def stopped(self, global_step):
        step(self, global_step)
        if global_step == 1:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(TrainingStep, "optimizer_step", stopped)
    config = configs.replace(config, name="ahead")
    first = train(config)
    assert first.stopped_by == signal.SIGTERM
    # The first batch of the next step, and the batch after it, are loaded again by the resumed run.
    assert [name for name, *_ in calls].count("copy") == accumulate + 2
    calls.clear()
    assert_same_run(train(config, resume=first.run_dir).run_dir, expected)
    evaluations = 3 * 3
    assert [name for name, *_ in calls].count("copy") == 2 * 6 - accumulate + evaluations
