"""`tresnet shard`: what it writes, and what it refuses."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from tresnet.cli.main import main
from tresnet.data.decoding import crop_of
from tresnet.data.shards import write_shards
from tresnet.data.sources import open_split
from tresnet.errors import DataError, InputError, MissingDependencyError, WriteError

datasets = pytest.importorskip("datasets")


@pytest.fixture
def images(make_images, tmp_path):
    make_images(tmp_path / "images/train", {"a": 5, "b": 4, "c": 3})
    return tmp_path / "images"


def sharded(images, out, *, skip=False, workers=1, **settings):
    """(the folder's data set, that of the shards made of it)."""
    folder = open_split(images, "train", skip_bad_images=skip)
    write_shards({"train": folder}, out, **settings, workers=workers)
    return folder, open_split(str(out), "train")


def test_the_images_labels_and_order_are_those_of_the_folder(images, tmp_path, monkeypatch):
    monkeypatch.chdir(images / "train/a")  # where `datasets` would find files of the same names
    folder, shards = sharded(images, tmp_path / "out", workers=2)
    assert shards.classes == folder.classes
    assert torch.equal(shards.targets, folder.targets)
    for index in range(12):
        assert shards.encoded_image(index).data == folder.encoded_image(index).data
    theirs = datasets.load_from_disk(str(tmp_path / "out"))["train"]
    assert [row["label"] for row in theirs] == folder.targets.tolist()
    assert all(np.array_equal(row["image"], folder[i][0]) for i, row in enumerate(theirs))


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({}, (260, 180)),
        ({"max_side": 130}, (130, 90)),
        ({"short_side": 60}, (87, 60)),
        ({"short_side": 60, "pixels": True}, (87, 60)),
    ],
)
def test_only_larger_images_become_smaller(tmp_path, photo, settings, size):
    place = tmp_path / "images/train/a"
    place.mkdir(parents=True)
    (place.parent / "b").mkdir()
    photo.save(place / "large.png")
    photo.resize((50, 40)).save(place.parent / "b/small.jpg")
    _, shards = sharded(tmp_path / "images", tmp_path / "out", quality=95, **settings)
    large, small = (image for image, _ in shards)
    for picture, image in zip(map(shards.encoded_image, range(2)), (large, small), strict=True):
        box = (9, 7, 20, 30)
        assert torch.equal(picture.crop(box), crop_of(image, box))
    assert large.size == size
    expected = np.asarray(photo.resize(size, Image.Resampling.LANCZOS), dtype=float)
    error = np.abs(np.asarray(large, dtype=float) - expected).mean()
    # noise in a JPEG, of a deviation of 74
    assert error == 0 if not settings or "pixels" in settings else error < 15
    assert np.array_equal(small, Image.open(place.parent / "b/small.jpg"))


@pytest.mark.parametrize(
    "settings", [{"max_side": 0}, {"short_side": -5}, {"quality": 0}, {"quality": 1000}], ids=str
)
def test_a_number_out_of_range_is_refused_before_a_file_is_made(images, tmp_path, settings):
    ((name, value),) = settings.items()
    with pytest.raises(InputError, match=f"^--{name.replace('_', '-')}: .*, got {value}$"):
        sharded(images, tmp_path / "new/out", **settings)
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_unreadable_image_stops_or_is_left_out(images, tmp_path, workers):
    (images / "train/b/bad.jpg").write_bytes(b"\xff\xd8 no image")
    with pytest.raises(DataError, match=r"^expected .*bad\.jpg cannot be read .* --skip-bad"):
        sharded(images, tmp_path / "out", workers=workers)
    assert [path.name for path in tmp_path.iterdir()] == ["images"]
    folder, shards = sharded(images, tmp_path / "out", skip=True, workers=workers)
    assert len(shards) == len(folder) - 1 == 12
    assert shards.targets.bincount().tolist() == [5, 4, 3]
    assert shards.encoded_image(11).data == folder.encoded_image(12).data
    for path in folder.paths:
        open(path, "w").close()
    with pytest.raises(DataError, match="all 13 are unreadable"):
        sharded(images, tmp_path / "none", skip=True)


def test_labels_may_be_several(images, tmp_path):
    lines = ["image,labels", "train/a/000.png,x;z", "train/b/005.png,", "train/c/009.png,y"]
    for split in ("train", "val"):
        (images / f"{split}.csv").write_text("\n".join(lines))
    out = str(tmp_path / "out")
    assert main(["shard", str(images), out, "--multilabel", "--workers", "1"]) == 0
    expected = open_split(images, "train", multi=True)
    for split in ("train", "val"):
        shards = open_split(out, split, multi=True)
        assert shards.classes == ["x", "y", "z"]
        assert torch.equal(shards.targets, expected.targets)
    assert main(["shard", out, f"{out}2", "--max-side", "4", "--workers", "1"]) == 0
    assert open_split(f"{out}2", "train", multi=None)[0][0].size == (4, 4)


def test_the_command_writes_both_splits_and_says_what_is_wrong(
    images, make_images, tmp_path, capsys
):
    make_images(images / "val", {"a": 1, "b": 1, "c": 1})
    out = tmp_path / "new/out"
    assert main(["shard", str(images), str(out), "--max-side", "4", "--workers", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{out}/train: 12 images, 3 classes, 0 unreadable left out",
        f"{out}/validation: 3 images, 3 classes, 0 unreadable left out",
    ]
    before = sorted(tmp_path.rglob("*"))
    other = tmp_path / "other"
    for arguments, message in [
        ((images, images), "expected a new or empty directory, got"),
        ((images, out), "expected a new or empty directory, got"),
        ((images, other, "--max-side", 4, "--short-side", 4), "leave one out"),
        ((images, other, "--quality", 0), "--quality: expected at least 1, got 0"),
    ]:
        assert main(["shard", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk_leaves_nothing(images, tmp_path, monkeypatch):
    def save(self, folder):
        (folder / "part").touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(datasets.DatasetDict, "save_to_disk", save)
    with pytest.raises(WriteError, match=r"cannot write .*/out: .* No space left .*disk full"):
        sharded(images, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


def test_a_missing_library_is_named(images, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match=r"tresnet\[hf\]"):
        sharded(images, tmp_path / "out")
