"""A data set of noise in three colours, and a network small enough to train on it in a second."""

import functools
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.runs import write_images
from tresnet.engine import config as configs
from tresnet.engine.config import TrainConfig
from tresnet.engine.train import train


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """26 images to train (6 batches of 4 and a rest), 11 to validate, 3 classes."""
    root = tmp_path_factory.mktemp("coloured")
    write_images(root, train=26, val=11)
    return root


def config_on(images: Path, run_dirs: Path, /, **changes: Any) -> TrainConfig:
    """Return a configuration of 2 epochs of 6 batches with every random option on."""
    settings = {
        "model": "tresnet_t",
        "width_factor": 0.125,
        "layers": (1, 1, 1, 1),
        "drop_rate": 0.2,
        "drop_path_rate": 0.2,
        "data": str(images),
        "batch_size": 4,
        "input_size": 12,
        "crop_pct": 1.0,
        "workers": 0,
        "epochs": 2,
        "lr": 0.02,
        "ema_decay": 0.9,
        "mixup": 0.2,
        "mix_prob": 0.7,
        "label_smoothing": 0.1,
        "device": "cpu",
        "runs": str(run_dirs),
        "name": "run",
        "progress": False,
        "tensorboard": False,
    }
    return configs.replace(TrainConfig(recipe="digits"), **(settings | changes))


@pytest.fixture(autouse=True, scope="module")
def undrawn():
    """Hide matplotlib: drawing a picture takes longer than such a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        yield


@pytest.fixture
def tiny(data, tmp_path):
    """Make configurations by `config_on` that run in a directory of the test's own."""
    return functools.partial(config_on, data, tmp_path / "runs")


@pytest.fixture(scope="session")
def finished(data, tmp_path_factory):
    """The directory of one such run from its beginning to its end, to compare others with."""
    return train(config_on(data, tmp_path_factory.mktemp("finished"))).run_dir
