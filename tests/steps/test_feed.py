"""Loaders give bytes; what is computed is what floats from the loader gave."""

import pytest
import torch
from torch import nn

from tests.engine.runs import assert_same_run
from tresnet.data.transforms import eval_transform, train_transform
from tresnet.engine import config as configs
from tresnet.engine import images as run_images
from tresnet.engine.batch_size import MicroBatches
from tresnet.engine.distributed import Processes
from tresnet.engine.prepare import create_step
from tresnet.engine.resolve import create_model, resolve
from tresnet.engine.train import train
from tresnet.settings import Compute
from tresnet.steps import InferenceStep
from tresnet.steps.feed import Feed, reads_bytes

CPU = torch.device("cpu")
ALONE = Processes(0, 1, CPU)


def test_floats_are_those_of_the_transform_to_the_bit():
    every = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(2, 3, 16, 16)
    expected = every.float().div(255)
    for channels_last in (False, True):
        compute = Compute(channels_last=channels_last)
        labels = torch.arange(2)
        found, same = Feed(compute, CPU, keep_bytes=False)(every, labels)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        assert found.dtype == torch.float32
        assert found.is_contiguous(memory_format=layout)
        assert torch.equal(found, expected)
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
    config = resolve(tiny(**changes))
    splits = run_images.open_splits(config, ALONE)
    train_loader, val_loader = run_images.create_loaders(config, splits, 4, ALONE)
    step = create_step(create_model(config, splits.classes), config, ALONE, MicroBatches(4, 1, 6))
    testing = InferenceStep(step.eval_model, config.compute, CPU)
    for loader, feed, dtype in (
        (train_loader, step.feed, trained),
        (val_loader, testing.feed, tested),
    ):
        images, labels = next(iter(loader))
        assert images.dtype == torch.uint8
        assert images.nbytes == 4 * 3 * 12 * 12
        assert feed(images, labels)[0].dtype == dtype


def test_a_run_on_bytes_is_the_run_on_floats_to_the_bit(tiny, monkeypatch):
    """Bytes are kept in the second epoch, whose images are not mixed."""
    changes = {"mix_off_epochs": 1, "amp": "bf16"}
    config = tiny(name="bytes", affine_degrees=20.0, **changes)
    found = train(config).run_dir
    for build in (train_transform, eval_transform):
        monkeypatch.setattr(run_images, build.__name__, lambda *args, _b=build, dtype: _b(*args))
    assert_same_run(found, train(configs.replace(config, name="floats")).run_dir)
