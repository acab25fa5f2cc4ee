import os
import pickle
import random
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tresnet.engine import state
from tresnet.engine.distributed import Processes
from tresnet.engine.state import Identity, Progress
from tresnet.engine.train import create_step
from tresnet.errors import CheckpointError, ConfigError
from tresnet.models.zoo import build

ALONE = Processes(0, 1, torch.device("cpu"))
IDENTITY = Identity(1, "abc", ["blue", "red"])


@pytest.fixture
def step(tiny):
    model = build("tresnet_t", width_factor=0.125, layers=(1, 1, 1, 1), num_classes=3)
    return create_step(model, tiny(), ALONE, 6)


def draw():
    return random.random(), np.random.rand(), np.random.randn(), torch.rand(3).tolist()  # noqa: NPY002


def test_random_generators_go_on_where_they_were(tmp_path):
    state.seed_everything(7, ALONE.device)
    draw()
    torch.save(state.random_state(ALONE.device), tmp_path / "state")
    expected = draw()
    state.seed_everything(8, ALONE.device)
    loaded = torch.load(tmp_path / "state", weights_only=True)
    state.set_random_state(loaded, ALONE.device)
    assert draw() == expected


def test_seeding_reaches_every_generator():
    state.seed_everything(7, ALONE.device)
    first = draw()
    state.seed_everything(7, ALONE.device)
    assert draw() == first
    state.seed_everything(8, ALONE.device)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_a_state_comes_back_whole(step, tmp_path):
    progress = Progress(epoch=2, batch=3, update=11, loss_sum=1.5, best_score=40.0, best_epoch=1)
    state.save(tmp_path / "last.pt", step, progress, IDENTITY, ALONE)
    content = state.load(tmp_path / "last.pt")
    assert state.restore(content, step, IDENTITY, ALONE) == progress


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        (Identity(2, "abc", ["blue", "red"]), "started with 1 processes and is resumed with 2"),
        (Identity(1, "abc", ["blue"]), "trained on 2 classes (blue, red), the data now have 1"),
        (Identity(1, "xyz", ["blue", "red"]), "the training images are not the ones"),
    ],
)
def test_a_state_of_other_data_or_processes_is_refused(step, tmp_path, identity, message):
    state.save(tmp_path / "last.pt", step, Progress(), IDENTITY, ALONE)
    with pytest.raises(ConfigError) as error:
        state.restore(state.load(tmp_path / "last.pt"), step, identity, ALONE)
    assert message in str(error.value)


def test_an_absent_a_truncated_and_a_foreign_file_are_refused(step, tmp_path):
    path = tmp_path / "last.pt"
    with pytest.raises(CheckpointError, match="expected a checkpoint to resume from at"):
        state.load(path)
    state.save(path, step, Progress(), IDENTITY, ALONE)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"cannot read .*last\.pt, which is damaged"):
        state.load(path)
    torch.save({"model": {}}, path)
    with pytest.raises(CheckpointError, match="expected a training state of format 1 in"):
        state.load(path)


class Bomb:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def test_code_in_a_file_is_not_run(tmp_path):
    path, mark = tmp_path / "last.pt", tmp_path / "exploded"
    torch.save({"format": Bomb(str(mark))}, path)
    with pytest.raises(CheckpointError, match="damaged or was not written by this program"):
        state.load(path)
    path.write_bytes(pickle.dumps(Bomb(str(mark)), protocol=2))
    with pytest.raises(CheckpointError, match="damaged or was not written by this program"):
        state.load(path)
    assert not mark.exists()


def test_the_error_does_not_tell_how_to_run_the_code(tmp_path):
    torch.save({"format": Bomb(str(tmp_path / "exploded"))}, tmp_path / "last.pt")
    with pytest.raises(CheckpointError) as caught:
        state.load(tmp_path / "last.pt")
    assert "weights_only" not in str(caught.value)


def test_a_state_that_is_not_whole_is_refused(tmp_path):
    torch.save({"format": 1}, tmp_path / "last.pt")
    with pytest.raises(CheckpointError, match="expected a whole training state"):
        state.load(tmp_path / "last.pt")


FULL_DISK = """
import resource, sys
from pathlib import Path
import torch
from tresnet.engine import config, state
from tresnet.engine.distributed import Processes
from tresnet.engine.train import create_step
from tresnet.errors import CheckpointError
from tresnet.models.zoo import build

path, alone = Path(sys.argv[1]), Processes(0, 1, torch.device("cpu"))
model = build("tresnet_t", width_factor=0.125, layers=(1, 1, 1, 1), num_classes=3)
step = create_step(model, config.TrainConfig(), alone, 6)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    state.save(path, step, state.Progress(update=2), state.Identity(1, "abc", []), alone)
except CheckpointError as error:
    print(error)
"""


def test_a_full_disk_leaves_the_old_state_intact(step, tmp_path):
    path = tmp_path / "last.pt"
    state.save(path, step, Progress(update=1), IDENTITY, ALONE)
    assert path.stat().st_size > 50_000
    before = path.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert f"cannot write the checkpoint {path}" in done.stdout
    assert "the one written before is intact. Free some space" in done.stdout
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]
    assert state.load(path)["progress"]["update"] == 1
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 50_000
