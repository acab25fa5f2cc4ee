"""Small folders of images with the faults that users' folders have."""

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

# Of tests with two workers: Python 3.12+ warns that pytest's process has threads when it forks,
# and torch that there is but one core.
WORKER_WARNINGS = (
    "ignore:.*multi-threaded, use of fork:DeprecationWarning",
    "ignore:This DataLoader will create:UserWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for text in WORKER_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(text))


@pytest.fixture
def make_images():
    """Return a function that writes `<root>/<class>/<i>.png`, image i of solid grey i."""

    def make(root: Path, counts: dict[str, int]) -> Path:
        serial = 0
        for name, count in counts.items():
            (root / name).mkdir(parents=True)
            for _ in range(count):
                path = root / name / f"{serial:03d}.png"
                Image.new("RGB", (8, 8), (serial,) * 3).save(path)
                serial += 1
        return root

    return make


@pytest.fixture
def photo() -> Image.Image:
    """A picture with smooth and sharp parts, wider than high."""
    y, x = np.mgrid[0:180, 0:260]
    waves = np.stack([np.sin(x / 9), np.cos(y / 5), np.sin((x + y) / 23)], axis=-1)
    noise = np.random.RandomState(0).uniform(-0.3, 0.3, waves.shape)
    return Image.fromarray(((waves + noise).clip(-1, 1) * 127 + 128).astype(np.uint8))


@pytest.fixture
def folder(tmp_path, make_images) -> Path:
    """26 images in 3 classes; image i is solid grey i, so that a batch tells what is in it."""
    return make_images(tmp_path / "train", {"a": 11, "b": 8, "c": 7}).parent


@pytest.fixture
def workers_now():
    """Return a function that lists the worker processes started since the test began."""
    before = set(multiprocessing.active_children())
    return lambda: set(multiprocessing.active_children()) - before
