import os
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from tresnet.cli.main import main
from tresnet.data.folder import open_folder
from tresnet.data.loaders import create_loader
from tresnet.data.multilabel import open_multilabel
from tresnet.data.pictures import BadImageError, crop_of
from tresnet.data.shards import ShardDataset, write_shards
from tresnet.data.transforms import Augment, train_transform
from tresnet.errors import BusyError, ConfigError, DataError, MissingDependencyError
from tresnet.files import lock
from tresnet.settings import ShardSettings

pytest.importorskip("array_record")
EMPTY = """{"format": 2, "shards": [], "classes": ["a"], "labels": [], "digest": "",
"multilabel": false}"""
PNGS = {"a": 5, "b": 4, "c": 3}


def sharded(images, out, *, skip=False, workers=1, log=lambda line: None, **settings):
    """(the folder's data set, that of the shards made of it)."""
    out.mkdir(exist_ok=True)
    dataset = open_folder(images, "train", None, skip)
    write_shards(dataset, images, out, ShardSettings(**settings), workers=workers, log=log)
    return dataset, ShardDataset(out, "train")


@pytest.fixture
def images(make_images, tmp_path):
    make_images(tmp_path / "images/train", PNGS)
    return tmp_path / "images"


def test_batches_of_shards_are_those_of_the_folder_in_forked_workers_too(images, tmp_path):
    folder, shards = sharded(images, tmp_path / "out", images_per_shard=5, workers=2)
    assert len(list((tmp_path / "out").glob("*.array_record"))) == 3
    assert (shards.classes, len(shards.paths)) == (folder.classes, 12)
    assert torch.equal(shards.targets, folder.targets)
    for (image, _), (expected, _) in zip(shards, folder, strict=True):  # files open before the fork
        assert np.array_equal(image, expected)
    batches = []
    for dataset, workers in ((folder, 0), (shards, 0), (shards, 2)):
        dataset.transform = train_transform(Augment(), 8, dtype=torch.uint8)
        loader = create_loader(dataset, 4, training=True, workers=workers, seed=3)
        loader.set_epoch(1, 1)
        batches.append(list(loader))
        loader.close()
    for found in batches[1:]:
        for (image, label), (expected, number) in zip(found, batches[0], strict=True):
            assert torch.equal(image, expected)
            assert torch.equal(label, number)


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({}, (260, 180)),
        ({"max_side": 130}, (130, 90)),
        ({"short_side": 60}, (87, 60)),
        ({"short_side": 60, "pixels": True}, (87, 60)),
    ],
)
def test_only_larger_images_become_smaller_jpegs(tmp_path, photo, settings, size):
    place = tmp_path / "images/train/a"
    place.mkdir(parents=True)
    photo.save(place / "large.png")
    photo.resize((50, 40)).save(place / "small.jpg")
    _, shards = sharded(tmp_path / "images", tmp_path / "out", quality=95, **settings)
    large, small = (image for image, _ in shards)
    for picture, image in zip(map(shards.picture, range(2)), (large, small), strict=True):
        box = (9, 7, 20, 30)
        assert torch.equal(picture.crop(box), crop_of(image, box))
    assert large.size == size
    expected = np.asarray(photo.resize(size, Image.Resampling.LANCZOS), dtype=float)
    error = np.abs(np.asarray(large, dtype=float) - expected).mean()
    # noise in a JPEG, of a deviation of 74
    assert error == 0 if not settings or "pixels" in settings else error < 15
    assert np.array_equal(small, Image.open(place / "small.jpg"))


def test_a_command_that_was_stopped_goes_on_and_writes_anew_what_changed(images, tmp_path):
    lines = []

    def stop(line):
        lines.append(line)
        if len(lines) == 2:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        sharded(images, out, images_per_shard=3, log=stop)
    assert not (out / "train.shards.json").exists()
    with pytest.raises(
        DataError, match=r"expected the manifest of shards in .*train\.shards\.json"
    ):
        ShardDataset(out, "train")
    _, shards = sharded(images, out, images_per_shard=3, log=lines.append)
    assert [line.endswith(", kept") for line in lines[2:]] == [True, True, False, False]
    Image.new("RGB", (9, 9), (200, 0, 0)).save(images / "train/a/000.png")
    file = out / "train-00001.array_record"
    file.write_bytes(file.read_bytes()[:-70_000])
    lines.clear()
    _, changed = sharded(images, out, images_per_shard=3, log=lines.append)
    assert [line.endswith(", kept") for line in lines] == [False, False, True, True]
    assert changed[0][0].size == (9, 9)
    assert changed.digest != shards.digest
    assert not list(out.glob(".*.tmp"))
    for other in ("train-00009.txt", "train-x.array_record", "val-00009.array_record"):
        (out / other).touch()
    _, fewer = sharded(images, out, images_per_shard=9)
    assert len(fewer) == 12
    assert {file.name for file in out.iterdir()} - {".lock"} == {
        *("train-00000.array_record", "train-00001.array_record", "train.shards.json"),
        *("train-00009.txt", "train-x.array_record", "val-00009.array_record"),
    }


def test_a_shard_at_the_place_of_another_gives_no_wrong_labels(make_images, tmp_path):
    make_images(tmp_path / "images/train", {"a": 2, "b": 2})
    out = tmp_path / "out"
    sharded(tmp_path / "images", out, images_per_shard=2)
    first, second = sorted(out.glob("*.array_record"))
    assert first.stat().st_size == second.stat().st_size
    content = first.read_bytes(), second.read_bytes()
    first.write_bytes(content[1])
    second.write_bytes(content[0])
    with pytest.raises(BadImageError, match=r"00000.*\[1\].*expected label 0, .*got 1: .*again"):
        ShardDataset(out, "train")[1]


def test_damage_is_named_wherever_it_is(images, tmp_path):
    """Every byte that belongs to an image is under a checksum of the record or of the file."""
    out = tmp_path / "out"
    _, shards = sharded(images, out)
    file = out / "train-00000.array_record"
    content = file.read_bytes()
    intact = [np.asarray(image) for image, _ in shards]
    outcomes = Counter()
    draw = np.random.default_rng(0)
    used = np.flatnonzero(np.frombuffer(content, np.uint8))  # the rest pads blocks of 64 KiB
    for place in draw.choice(used, 120):
        damaged = bytearray(content)
        damaged[place] ^= 1 << draw.integers(8)
        file.unlink()  # which a data set may still have open
        file.write_bytes(damaged)
        dataset = ShardDataset(out, "train")
        for index, expected in enumerate(intact):
            try:
                image, _ = dataset[index]
            except BadImageError as error:
                outcomes["named" if f"{file.name}[{index}]" in error.path else "wrong"] += 1
            else:
                outcomes["equal" if np.array_equal(image, expected) else "wrong"] += 1
    assert outcomes["named"] > 50
    assert not outcomes["wrong"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda out: (out / "train-00000.array_record").unlink(), "got no file"),
        (lambda out: os.truncate(out / "train-00000.array_record", 0), "got 0:"),
        (lambda out: (out / "train.shards.json").write_text("{}"), "KeyError: 'format'"),
        (lambda out: (out / "train.shards.json").write_bytes(b"\xff"), "UnicodeDecodeError"),
        (lambda out: (out / "train.shards.json").write_text(EMPTY), "no images"),
    ],
)
def test_files_that_do_not_fit_are_refused(images, tmp_path, damage, message):
    sharded(images, tmp_path / "out")
    damage(tmp_path / "out")
    with pytest.raises(DataError, match=message):
        ShardDataset(tmp_path / "out", "train")


def test_an_unreadable_image_stops_or_is_left_out(images, tmp_path):
    (images / "train/b/bad.jpg").write_bytes(b"\xff\xd8 no image")
    with pytest.raises(DataError, match=r"^expected .*bad\.jpg cannot be read .* --skip-bad"):
        sharded(images, tmp_path / "out", workers=2, images_per_shard=5)
    folder, shards = sharded(images, tmp_path / "out", skip=True)
    assert len(shards) == len(folder) - 1 == 12
    assert shards.targets.bincount().tolist() == list(PNGS.values())
    with pytest.raises(DataError, match="--skip-bad-images"):  # kept shards do not hide it
        sharded(images, tmp_path / "out")


def test_labels_may_be_several(images, tmp_path):
    lines = ["image,labels", "train/a/000.png,x;z", "train/b/005.png,", "train/c/009.png,y"]
    (images / "train.csv").write_text("\n".join(lines))
    command = ["shard", str(images), str(tmp_path / "out")]
    assert main([*command, "--multilabel", "--workers", "1"]) == 0
    expected = open_multilabel(images, "train")
    shards = ShardDataset(tmp_path / "out", "train")
    assert shards.multi
    assert shards.classes == ["x", "y", "z"]
    assert torch.equal(shards.targets, expected.targets)
    assert torch.equal(shards[0][1], torch.tensor([1.0, 0.0, 1.0]))


def test_labels_beside_a_folder_of_all_images_are_split_too(make_images, tmp_path):
    """As in docs/examples/many-labels.md: no folder has the name of a split."""
    make_images(tmp_path / "data", {"images": 3})
    for split, numbers in {"train": (0, 1), "val": (2,)}.items():
        lines = ["image,x,y", *(f"images/{number:03}.png,1,0" for number in numbers)]
        (tmp_path / "data" / f"{split}.csv").write_text("\n".join(lines))
    command = ["shard", str(tmp_path / "data"), str(tmp_path / "out"), "--multilabel"]
    assert main([*command, "--workers", "1"]) == 0
    assert [len(ShardDataset(tmp_path / "out", split)) for split in ("train", "val")] == [2, 1]


def test_the_command_writes_both_splits_and_says_what_is_wrong(
    images, make_images, tmp_path, capsys
):
    make_images(images / "val", {"a": 1, "b": 1, "c": 1})
    out = tmp_path / "new/out"
    assert main(["shard", str(images), str(out), "--max-side", "4", "--workers", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{out}/train.shards.json: 12 images, 3 classes, 0 left out",
        f"{out}/val.shards.json: 3 images, 3 classes, 0 left out",
    ]
    for arguments, message in [
        ((images / "nothing", out), "expected a folder train or val"),
        ((images, images), "expected another folder"),
        ((images, out, "--max-side", 4, "--short-side", 4), "leave one out"),
        ((images, out, "--quality", 0), "--quality: expected at least 1, got 0"),
    ]:
        assert main(["shard", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err


def test_shards_of_other_settings_are_left_alone(images, tmp_path):
    sharded(images, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    message = "holds shards that were written with other --pixels: write to another folder"
    with pytest.raises(ConfigError, match=message):
        sharded(images, tmp_path / "out", pixels=True)
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}


def test_settings_locks_and_a_missing_library_are_checked_first(images, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="--images-per-shard: expected at least 1, got 0"):
        sharded(images, tmp_path / "out", images_per_shard=0)
    with lock(tmp_path / "out"), pytest.raises(BusyError):
        sharded(images, tmp_path / "out")
    monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)
    with pytest.raises(MissingDependencyError, match=r"tresnet\[shards\]"):
        sharded(images, tmp_path / "out")
