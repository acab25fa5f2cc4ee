"""Stratified splits, against scikit-learn and chance, and images that are in both splits."""

import csv
import os
import re
import time

import numpy as np
import pytest

from tests.data.test_labels import write
from tests.engine.runs import write_images
from tresnet.cli.main import main
from tresnet.data.dataset import Paths
from tresnet.data.labels import Labels
from tresnet.data.sources import open_split
from tresnet.data.splitting import in_both, stratified, write_splits

selection = pytest.importorskip("sklearn.model_selection")


def test_each_class_has_scikit_learns_number_of_images_in_val():
    classes = np.repeat(np.arange(6), [400, 200, 100, 50, 30, 20])
    labels = Labels(tuple("abcdef"), classes)
    found = stratified(labels, 0.2, 3)
    theirs = selection.StratifiedShuffleSplit(1, test_size=0.2, random_state=0)
    _, val = next(theirs.split(classes, classes))
    assert np.array_equal(np.bincount(classes[found]), np.bincount(classes[val]))
    assert np.array_equal(found, stratified(labels, 0.2, 3))
    assert not np.array_equal(found, stratified(labels, 0.2, 4))
    rare = stratified(Labels(("a", "b", "c"), np.array([0] * 50 + [1, 1, 2])), 0.1, 0)
    assert (rare[:50].sum(), rare[50:52].sum(), rare[52]) == (5, 1, False)


def test_many_labels_are_split_more_evenly_than_by_chance():
    """Classes of images are drawn from 0.3 % to 30 %; the error is the largest of all classes."""
    generator = np.random.default_rng(0)
    hot = generator.random((4000, 20)) < np.geomspace(0.003, 0.3, 20)
    labels = Labels(tuple(map(str, range(20))), hot.nonzero()[1], hot.sum(1).cumsum())

    def error(held_out):
        return np.abs(hot[held_out].sum(0) / hot.sum(0) - 0.2)

    chances = [error(generator.permutation(4000) < 800).max() for _ in range(20)]
    found = stratified(labels, 0.2, 0)
    assert error(found).max() < min(chances)
    assert abs(found.mean() - 0.2) < 0.02
    assert (hot[found].sum(0) > 0).all()


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_the_command_splits_a_folder_and_files_without_copying(tmp_path, capsys):
    write(tmp_path, {}, " ".join(f"set/{c}/{i}.png" for c in ("a", "10", "9") for i in range(10)))
    assert main(["split", str(tmp_path / "set"), "--val-fraction", "0.3"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/set/train.csv: 21 images",
        f"{tmp_path}/set/val.csv: 9 images",
    ]
    train, val = (open_split(tmp_path / "set", split) for split in ("train", "val"))
    assert train.classes == val.classes == ["10", "9", "a"]  # the order of the folders
    assert val.labels.counts.tolist() == [3, 3, 3]
    assert not {*train.paths} & {*val.paths}
    before = sorted(tmp_path.rglob("*"))
    assert main(["split", str(tmp_path / "set")]) == 2
    assert f"expected no classes.txt in {tmp_path}/set: remove" in capsys.readouterr().err
    assert main(["split", str(tmp_path / "set/a"), "--val-fraction", "1"]) == 2
    assert main(["split", str(tmp_path / "coco.json")]) == 2
    assert "expected a folder or a CSV file, got" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
    twice = {"set/twice.csv": "image,label\na.png,x\n./a.png,y\n"}
    write(tmp_path, twice | dict.fromkeys(("lines/x/1.npy", "lines/y\u2028z/1.npy"), ""))
    for name, message in (
        ("set/twice.csv", "every image once, got a.png"),
        ("lines", "names of folders in .*lines without line breaks: rename"),
    ):
        assert main(["split", str(tmp_path / name)]) == 2
        assert re.search(message, capsys.readouterr().err)
    tables = {
        "image,label": [f"{i}.png,{'xy'[i % 2]}" for i in range(10)],
        "image,labels": [f"{i}.png,{'x;y' if i % 2 else 'y'}" for i in range(10)],
        "image,x,y": [f"{i}.png,{i % 2},1" for i in range(10)],
    }
    for number, (header, rows) in enumerate(tables.items()):
        root = tmp_path / str(number)
        write(
            root,
            {"labels.csv": "\n".join([header, *rows])},
            " ".join(f"{i}.png" for i in range(10)),
        )
        assert main(["split", str(root / "labels.csv"), "--val-fraction", "0.2"]) == 0
        train, val = (rows_of(root / f"{split}.csv") for split in ("train", "val"))
        assert train[0] == val[0] == header.split(",")
        assert sorted(train[1:] + val[1:]) == sorted(row.split(",") for row in rows)
        multi = number > 0
        data = [open_split(root, split, multi=multi) for split in ("train", "val")]
        assert [len(split) for split in data] == [8, 2]
        assert data[1].labels.counts.tolist() == ([1, 2] if multi else [1, 1])


def test_a_name_in_latin_1_is_refused_before_a_file_is_written(tmp_path, capsys):
    write(tmp_path, {}, " ".join(f"{c}/{i}.png" for c in "ab" for i in range(2)))
    (tmp_path / "b/1.png").rename(os.fsdecode(os.fsencode(tmp_path) + b"/b/caf\xe9.png"))
    assert main(["split", str(tmp_path)]) == 2
    assert r"names in UTF-8, got 'b/caf\udce9.png,b': rename such" in capsys.readouterr().err
    assert not [*tmp_path.glob("*.*")]


def test_arrays_beside_pictures_are_left_out(tmp_path, caplog):
    files = (f"{name}/{i}.{kind}" for name in "xy" for i in range(2) for kind in ("png", "npy"))
    write(tmp_path, {}, " ".join(files))
    assert write_splits(tmp_path, 0.5) == {"train": 2, "val": 2}
    assert "left out 4 files" in caplog.text


def test_a_long_header_is_searched_once(tmp_path):
    """With a search of each character's line, 60 kB would take half a minute."""
    header = ",".join(["image", *(f"class{i}" for i in range(6000))])
    row = ",1" * 6000
    write(tmp_path, {"all.csv": "\n".join([header, *(f"{i}.png{row}" for i in range(3))])})
    start = time.perf_counter()
    assert write_splits(tmp_path / "all.csv", 0.4) == {"train": 2, "val": 1}
    assert time.perf_counter() - start < 5


def test_images_in_both_splits_are_found_by_name_and_content(tmp_path):
    write_images(tmp_path, train=9, val=6)
    files = [sorted(map(str, (tmp_path / split).rglob("*.png"))) for split in ("train", "val")]
    train, val = map(Paths, files)
    assert in_both(train, val) == []
    assert in_both(train, Paths([*val, train[3]])) == [(train[3], train[3])]
    copy = tmp_path / "val/red/copy.png"
    copy.write_bytes((tmp_path / train[3]).read_bytes())
    other = tmp_path / "val/red/other.png"  # of equal size
    other.write_bytes((tmp_path / train[4]).read_bytes()[:-1] + b"x")
    gone = tmp_path / "val/red/gone.png"
    assert in_both(train, Paths([*val, str(other), str(copy), str(gone)])) == [
        (str(copy), train[3])
    ]


def test_files_that_cannot_be_read_equal_no_others(tmp_path):
    for name in ("a", "b"):  # reading a directory is an OSError, also for root
        (tmp_path / name).mkdir()
    assert in_both(Paths([str(tmp_path / "a")]), Paths([str(tmp_path / "b")])) == []
