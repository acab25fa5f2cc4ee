import dataclasses
import math
import os
import pickle
import random
import struct
import zipfile

import numpy as np
import pytest
import torch

from tresnet.checkpoints.weights import open_weights
from tresnet.engine import state
from tresnet.engine.distributed import Processes
from tresnet.engine.state import Identity, Progress, Record
from tresnet.engine.train import create_step
from tresnet.errors import CheckpointError, ConfigError
from tresnet.models.zoo import build

ALONE = Processes(0, 1, torch.device("cpu"))
IDENTITY = Identity(1, "abc", "def", "", ("blue", "red"))


@pytest.fixture
def step(tiny):
    model = build("tresnet_t", width_factor=0.125, layers=(1, 1, 1, 1), num_classes=3)
    return create_step(model, tiny(), ALONE, 6)


@pytest.fixture
def record(tiny):
    return Record(tiny(), IDENTITY)


def draw():
    return random.random(), np.random.rand(), np.random.randn(), torch.rand(3).tolist()  # noqa: NPY002


def test_seeding_reaches_every_generator():
    state.seed_everything(7, ALONE.device)
    first = draw()
    state.seed_everything(7, ALONE.device)
    assert draw() == first
    state.seed_everything(8, ALONE.device)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_a_state_comes_back_whole(step, record, tmp_path):
    record.progress = Progress(epoch=2, batch=3, update=11, loss_sum=1.5, best_score=40.0)
    record.rows = [{"phase": "train", "loss": math.inf, "step": 6, "accuracy": None}]
    state.save(tmp_path, step, record, ALONE)
    found, content = state.read(tmp_path / "last.pt")
    assert found == record
    state.restore(content, step, ALONE)
    state.add_row(tmp_path, {"phase": "final"})
    again, other = state.read(tmp_path / "last.pt")
    assert again.rows == [*record.rows, {"phase": "final"}]
    assert all(torch.equal(other["model"][name], content["model"][name]) for name in other["model"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes": ("blue",)}, "trained on 2 classes (blue, red), the data now have 1"),
        ({"train": "xyz"}, "the training images are not the ones"),
        ({"val": "xyz"}, "the validation images are not the ones"),
        ({"beside": "xyz"}, "--hierarchy, --teacher: the file is not the one the run began with"),
    ],
)
def test_a_state_of_other_data_is_refused(change, message):
    with pytest.raises(ConfigError) as error:
        state.check(IDENTITY, dataclasses.replace(IDENTITY, **change))
    assert message in str(error.value)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1000])


def flip_a_bit(path):
    """In the middle of a tensor, where torch itself does not notice."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda info: info.file_size)
    data = bytearray(path.read_bytes())
    name, padding = struct.unpack_from("<HH", data, largest.header_offset + 26)
    begin = largest.header_offset + 30 + name + padding
    data[begin + largest.file_size // 2] ^= 1
    path.write_bytes(data)


def fill(path):
    path.write_bytes(b"\xff" * 5000)


def change(key, value):
    def write(path):
        content = torch.load(path, weights_only=True)
        torch.save({**content, key: value} if value is not None else {"format": state.FORMAT}, path)

    return write


DAMAGES = {
    "truncated": truncate,
    "flipped": flip_a_bit,
    "garbage": fill,
    "empty": lambda path: path.write_bytes(b""),
    "foreign": change("format", 7),
    "half": change("format", None),
    "odd progress": change("progress", {"epoch": "two"}),
    "odd identity": change("identity", {"world": 1}),
    "odd rows": change("rows", [{"loss": torch.zeros(3)}]),
    "odd metadata": change("metadata", {"config": {"variant": "tresnet_q"}}),
    "odd generators": change("generators", []),
    "odd config": change("config", {"optim": {"lr": "fast"}}),
    "directory": lambda path: (path.unlink(), path.mkdir()),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_state_falls_back_to_the_one_before_and_says_so(step, record, tmp_path, damage):
    for update in (1, 2, 3):
        record.progress.update = update
        state.save(tmp_path, step, record, ALONE)
    said = []
    assert state.find(tmp_path, said.append) == tmp_path / "last.pt"
    damage(tmp_path / "last.pt")
    assert state.find(tmp_path, said.append) == tmp_path / "previous.pt"
    assert state.read(tmp_path / "previous.pt")[0].progress.update == 2
    if damage is not DAMAGES["missing"]:
        assert "going on from" in said.pop()
        assert (tmp_path / "damaged.pt").exists()
    assert said == []
    state.save(tmp_path, step, record, ALONE)
    state.read(tmp_path / "previous.pt")
    for name in ("last.pt", "previous.pt"):
        fill(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"last\.pt, .*previous\.pt, .*: start a new run"):
        state.find(tmp_path, said.append)


def test_without_links_the_state_before_is_kept_too(step, record, tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError("Operation not supported")

    monkeypatch.setattr(os, "link", unsupported)
    for update in (1, 2):
        record.progress.update = update
        state.save(tmp_path, step, record, ALONE)
    updates = [
        state.read(tmp_path / name)[0].progress.update for name in ("previous.pt", "last.pt")
    ]
    assert updates == [1, 2]


def test_a_state_of_another_model_is_refused(step, record, tmp_path):
    state.save(tmp_path, step, record, ALONE)
    _, content = state.read(tmp_path / "last.pt")
    for odd in ({"model": {}}, {"optimizer": {"state": 3}}, {"generators": []}):
        with pytest.raises(CheckpointError, match="does not fit the model or its optimizer"):
            state.restore(content | odd, step, ALONE)


class Bomb:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def test_code_in_a_file_is_not_run(tmp_path):
    path, mark = tmp_path / "last.pt", tmp_path / "exploded"
    torch.save({"format": Bomb(str(mark))}, path)
    with pytest.raises(CheckpointError, match="damaged or was not written by this") as caught:
        state.read(path)
    assert "weights_only" not in str(caught.value)  # which tells how to run it
    path.write_bytes(pickle.dumps(Bomb(str(mark)), protocol=2))
    with pytest.raises(CheckpointError, match="damaged or was not written by this program"):
        state.read(path)
    assert not mark.exists()


def test_a_state_is_not_taken_for_weights(step, record, tmp_path):
    """It would be: by its tensors alone, as a model of another input and without classes."""
    state.save(tmp_path, step, record, ALONE)
    with pytest.raises(CheckpointError, match=r"last\.pt is the state of a run.*best.safetensors"):
        open_weights(tmp_path / "last.pt")
