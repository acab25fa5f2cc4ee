"""The loaders that are compared give the same pictures; only their form differs."""

import sys
from multiprocessing import active_children
from types import ModuleType

import pytest
import torch
from PIL import Image

from tresnet.data import contenders
from tresnet.data.contenders import loaders_in, write_jpegs

# timm leaves it to the garbage collector to close image files.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("jpegs")
    for split in ("train", "val"):
        write_jpegs(root, split, count=5)
    return root


def contending(folder, split, workers=0):
    """5 files to 6 images of an epoch: one comes round again. DALI, where installed, rounds."""
    opened = loaders_in(folder, split, {}, length=6, batch_size=3, size=32, workers=workers)
    return [opens() for name, opens in opened.items() if not name.startswith("DALI")]


def test_the_pictures_are_of_a_photographs_size(folder):
    files = sorted((folder / "val").rglob("*.jpg"))
    assert len(files) == 5
    for file in files:
        assert 30_000 < file.stat().st_size < 90_000
        with Image.open(file) as image:
            assert (image.size, image.mode) == (contenders.JPEG_SIZE, "RGB")


def test_all_evaluate_the_same_pictures(folder):
    loaders = (list(loader) for loader in contending(folder, "val"))
    as_bytes, as_floats, timms_bytes, timms, torchvisions = loaders
    for other in (timms_bytes, torchvisions):
        for (x, labels), (y, same) in zip(as_bytes, other, strict=True):
            assert torch.equal(x, y)
            assert torch.equal(labels, same)
    assert len(as_bytes) == len(as_floats) == len(timms) == 2
    for (x, labels), (y, same), (z, theirs) in zip(as_bytes, as_floats, timms, strict=True):
        assert (x.dtype, y.dtype, z.dtype) == (torch.uint8, torch.float32, torch.float32)
        assert torch.equal(x.float() / 255, y)
        assert torch.equal(z, y)
        assert torch.equal(labels, same)
        assert torch.equal(labels, theirs)
    first, last = as_bytes[0][0][0], as_bytes[1][0][2]
    assert torch.equal(first, last)


def test_all_crop_at_random_in_training(folder):
    for loader in contending(folder, "train"):
        batches = [images for images, _ in loader]
        assert [batch.shape for batch in batches] == [(3, 3, 32, 32)] * 2
        assert len({int(image.float().sum() * 100) for batch in batches for image in batch}) == 6


def test_a_dali_that_cannot_be_imported_is_left_out_and_named(
    folder, tmp_path, monkeypatch, caplog
):
    (tmp_path / "dali.py").write_text("import a_missing_dependency")
    nvidia = ModuleType("nvidia")
    nvidia.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "nvidia", nvidia)
    assert len(contending(folder, "val")) == 5
    assert "DALI is left out, its import failed: No module named 'a_missing" in caplog.text


def test_the_time_of_a_training_image_is_told_by_stages(folder):
    ours, floats, *_ = contending(folder, "train")
    torch.manual_seed(7)
    stages = ours.stages()
    assert torch.initial_seed() == 7
    assert set(stages) == {"read", "decode", "resize", "augment"}
    assert min(stages.values()) > 0
    assert floats.stages() == {}


def test_workers_end_with_their_loader(folder):
    before = set(active_children())
    for loader in contending(folder, "val", workers=1):
        assert len(list(loader)) == 2
        assert len(set(active_children()) - before) == 1
        loader.close()
        assert set(active_children()) == before
