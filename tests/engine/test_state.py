import dataclasses
import os
import zipfile
from pathlib import Path

import pytest
import torch

from tests.engine.runs import ALONE, draw
from tests.toys import smallest
from tresnet import writing
from tresnet.engine import rundir, state
from tresnet.engine.batch_size import MicroBatches
from tresnet.engine.run import training_step
from tresnet.engine.state import Identity, Progress
from tresnet.errors import CheckpointError, ConfigError, WriteError

IDENTITY = Identity(1, "abc", "def", "", ("blue", "red"))


@pytest.fixture
def step(tiny):
    return training_step(smallest(), tiny(), ALONE, MicroBatches(4, 1, 6))


@pytest.fixture
def record(tiny):
    return {"config": tiny(), "identity": IDENTITY, "progress": Progress()}


def test_seeding_reaches_every_generator_and_restoring_pytorchs():
    drawn = []
    for seed in (7, 7, 8):
        state.seed_everything(seed, ALONE.device)
        saved = state.random_state(ALONE.device)
        drawn.append(draw())
    assert drawn[0] == drawn[1]
    assert all(a != b for a, b in zip(*drawn[1:], strict=True))
    state.set_random_state(saved, ALONE.device)
    assert draw()[2] == drawn[2][2]


def test_a_state_of_other_data_is_refused():
    for change, message in (
        ({"classes": ("blue",)}, r"trained on 2 classes \(blue, red\), the data now have 1"),
        ({"val": "xyz"}, "the validation images .* changed since the run began"),
    ):
        with pytest.raises(ConfigError, match=message):
            state.check(IDENTITY, dataclasses.replace(IDENTITY, **change))


def flip_a_bit(path):
    """Flip a bit in the middle of a tensor, where torch itself does not check."""
    with zipfile.ZipFile(path) as archive:
        largest = max(map(archive.read, archive.namelist()), key=len)
    data = bytearray(path.read_bytes())
    data[data.index(largest) + len(largest) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1000]),
    "flipped": flip_a_bit,
    "garbage": lambda path: path.write_bytes(b"\xff" * 5000),
    "half": lambda path: torch.save({"format": state.FORMAT}, path),
    "no state": lambda path: torch.save([1, 2], path),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_state_gives_way_to_the_one_before_and_says_so(step, record, tmp_path, damage):
    assert state.load(tmp_path, pytest.fail) is None
    last, previous = (tmp_path / name for name in ("last.pt", "previous.pt"))
    for update in (1, 2, 3):
        record["progress"].global_step = update
        state.save(tmp_path, step, processes=ALONE, **record)
    assert vars(state.load(tmp_path, pytest.fail)).items() >= record.items()
    damage(last)
    said = []
    saved = state.load(tmp_path, said.append)
    assert (saved.path, saved.progress.global_step) == (previous, 2)
    assert "last.pt" in said[0]
    assert f"continuing from {previous}, the one before" in said[0]
    rundir.reopen(tmp_path, record["config"], saved.path)
    assert not previous.exists()
    record["progress"].global_step = 4
    state.save(tmp_path, step, processes=ALONE, **record)
    assert [state.read(path).progress.global_step for path in (previous, last)] == [2, 4]
    for path in (last, previous):
        DAMAGES["garbage"](path)
    with pytest.raises(CheckpointError, match=r"last\.pt, .*previous\.pt, .*: start a new run"):
        state.load(tmp_path, pytest.fail)
    previous.unlink()
    previous.mkdir()
    with pytest.raises(WriteError, match=r"cannot write .*previous\.pt"):
        state.save(tmp_path, step, processes=ALONE, **record)


def test_the_last_state_is_missing_only_between_two_renames(step, record, tmp_path, monkeypatch):
    """A kill while the disk syncs the new file, which takes seconds, finds the file before."""
    state.save(tmp_path, step, processes=ALONE, **record)
    sync, there = writing._fsync, []
    monkeypatch.setattr(
        writing, "_fsync", lambda path: (there.append((tmp_path / "last.pt").exists()), sync(path))
    )
    state.save(tmp_path, step, processes=ALONE, **record)
    assert there == [True, True]  # the file, then its directory
    (tmp_path / "last.pt").unlink()
    said = []
    assert state.load(tmp_path, said.append).path == tmp_path / "previous.pt"
    assert said == [
        f"there is no {tmp_path / 'last.pt'}, as after a kill while it was replaced: continuing"
        f" from {tmp_path / 'previous.pt'}, the one before"
    ]


def test_a_state_of_another_model_is_refused(step, record, tmp_path):
    state.save(tmp_path, step, processes=ALONE, **record)
    content = state.read(tmp_path / "last.pt").state
    for odd in (
        *({key: value} for key in ("model", "optimizer") for value in (None, "x", {})),
        *({"generators": value} for value in ([], [1], [{}])),
    ):
        with pytest.raises(CheckpointError, match="does not fit the model or its optimizer"):
            state.restore(content | odd, step, ALONE)


@pytest.mark.parametrize("odd", ["x", {"a": 1}], ids=repr)
def test_values_of_wrong_types_are_refused(step, record, tmp_path, odd):
    state.save(tmp_path, step, processes=ALONE, **record)
    content = state.read(tmp_path / "last.pt").state
    del content["model"], content["optimizer"]  # nothing of them is read here
    progress = dataclasses.asdict(record["progress"])
    changes = [{key: odd} for key in ("format", "config", "identity", "metadata", "generators")]
    changes += [{"progress": progress | {key: odd}} for key in progress]
    for change in changes:
        torch.save(content | change, tmp_path / "odd.pt")
        with pytest.raises((CheckpointError, ConfigError)):  # nothing else
            state.read(tmp_path / "odd.pt")


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
    assert not mark.exists()
