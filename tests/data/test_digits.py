import functools
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tresnet.data import digits
from tresnet.data.sources import open_split
from tresnet.errors import DataError, MissingDependencyError


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return digits.write(tmp_path_factory.mktemp("data"))


def test_every_digit_is_in_one_split_and_each_class_is_held_out_by_a_fifth(written):
    train, val = open_split(written, "train"), open_split(written, "val")
    assert train.classes == val.classes
    assert train.classes == [str(digit) for digit in range(10)]
    names = [Path(path).name for path in [*train.paths, *val.paths]]
    assert len(names) == len(set(names)) == 1797
    counts = (split.targets.bincount().tolist() for split in (train, val))
    for in_train, in_val in zip(*counts, strict=True):
        assert in_val == round(0.2 * (in_train + in_val))
    assert (len(train), len(val)) == (1438, 359)


def test_writing_again_changes_nothing_and_needs_no_scikit_learn(written, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    before = {path: path.stat().st_mtime_ns for path in written.rglob("*")}
    assert digits.write(written.parent) == written
    assert {path: path.stat().st_mtime_ns for path in written.rglob("*")} == before
    assert os.listdir(written.parent) == ["digits"]


def test_a_damaged_folder_is_reported_and_left_alone(written, tmp_path):
    folder = shutil.copytree(written, tmp_path / "digits")
    (folder / ".DS_Store").write_bytes(b"left by a file manager")
    assert digits.write(tmp_path) == folder  # a file that is no image does not matter
    victim = next((folder / "val" / "3").iterdir())
    content, moved = victim.read_bytes(), folder / "val" / "4" / victim.name

    def replace_folder():
        shutil.rmtree(folder)
        folder.write_text("mine")

    other_pixels = functools.partial(Image.new("L", (8, 8)).save, victim)
    for damage in (victim.unlink, other_pixels, lambda: victim.rename(moved), replace_folder):
        damage()
        damaged = sorted(tmp_path.rglob("*"))
        with pytest.raises(
            DataError, match=r"the digits as written .*digits, but found other or d"
        ):
            digits.write(tmp_path)
        assert sorted(tmp_path.rglob("*")) == damaged
        if folder.is_dir():
            moved.unlink(missing_ok=True)
            victim.write_bytes(content)
            assert digits.write(tmp_path) == folder


def test_the_process_that_comes_second_takes_the_firsts(written, tmp_path, monkeypatch):
    write_pngs = digits._write_pngs

    def overtaken(folder):
        write_pngs(folder)
        shutil.copytree(written, tmp_path / "digits")

    monkeypatch.setattr(digits, "_write_pngs", overtaken)
    assert digits.write(tmp_path) == tmp_path / "digits"
    assert os.listdir(tmp_path) == ["digits"]


def test_other_digits_and_no_scikit_learn_leave_nothing(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(digits, "load", lambda: (np.zeros((9, 8, 8), np.uint8), np.zeros(9, int)))
        with pytest.raises(DataError, match="ships other data"):
            digits.write(tmp_path)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'tresnet\[digits\]'"):
        digits.write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_canvases_of_several_digits_are_the_same_everywhere_and_written_once(tmp_path):
    canvases = digits.write(tmp_path, "digits_multilabel")
    before = (canvases / "train.csv").stat().st_mtime_ns
    assert digits.write(tmp_path, "digits_multilabel") == canvases
    assert (canvases / "train.csv").stat().st_mtime_ns == before
    train, val = (open_split(canvases, split, multi=True) for split in ("train", "val"))
    assert (len(train), len(val)) == (3000, 750)
    assert train.classes == [str(digit) for digit in range(10)]
    each = train.targets.sum(1)
    assert (each.min(), each.max()) == (1, 4)
    assert train[0][0].size == (40, 40)
