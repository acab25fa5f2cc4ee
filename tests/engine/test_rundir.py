import contextlib
import json
import types
from datetime import datetime
from pathlib import Path
from unittest.mock import Mock

import pytest

from tresnet.engine import config as configs
from tresnet.engine import logs, rundir
from tresnet.engine.config import AUTO
from tresnet.errors import BusyError, CheckpointError, WriteError

AUTO = Path(AUTO)


@pytest.fixture
def held():
    with contextlib.ExitStack() as stack:
        yield stack


def test_a_run_is_named_by_model_data_and_date_and_never_takes_anothers_place(
    tiny, held, monkeypatch
):
    config = tiny(name=None, data="some/place/")
    monkeypatch.setattr(rundir, "datetime", types.SimpleNamespace(now=lambda: datetime(2030, 1, 2)))
    directories = [rundir.create(config, held) for _ in range(3)]
    stem = "tresnet_t_place_20300102-000000"
    assert [d.name for d in directories] == [stem, f"{stem}-2", f"{stem}-3"]
    assert configs.load(directories[2] / rundir.CONFIG) == config
    odd = rundir.create(tiny(name=None, data="any bytes\udcfc"), held)
    assert odd.name == "tresnet_t_any bytes?_20300102-000000"


def test_a_name_is_taken_by_one_run_and_freed_by_one_that_cannot_begin(tiny, held, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(rundir.writing, "write_text", Mock(side_effect=WriteError("no space")))
        with pytest.raises(WriteError):
            rundir.create(tiny(), held)
    directory = rundir.create(tiny(), held)
    assert configs.load(directory / rundir.CONFIG) == tiny()
    for name in (logs.TRACKED, f"{logs.EVENTS}.1", "notes"):
        (directory / name).touch()
    rundir.discard(directory)
    assert [path.name for path in directory.iterdir()] == ["notes"]
    (directory / "notes").unlink()
    rundir.discard(directory)
    assert not directory.exists()
    rundir.discard(directory)  # somebody else was quicker


def test_each_start_of_a_run_leaves_its_environment(tmp_path):
    for version in "12":
        rundir.add_environment(tmp_path, {"torch": version})
    path = tmp_path / rundir.ENVIRONMENT
    assert json.loads(path.read_text()) == [{"torch": "1"}, {"torch": "2"}]
    path.write_bytes(b"\xff")
    rundir.add_environment(tmp_path, {"torch": "3"})
    assert json.loads(path.read_text()) == [{"torch": "3"}]


def test_auto_begins_in_a_new_or_an_empty_directory(tiny, held, tmp_path):
    assert rundir.claim(tiny(), AUTO, held, print) == (None, None)
    directory = tmp_path / "runs" / "run"
    directory.mkdir(parents=True)
    assert rundir.claim(tiny(), AUTO, held, print) == (directory, None)


def test_of_two_first_starts_at_once_one_runs(tiny, held):
    assert [rundir.claim(tiny(), AUTO, held, print) for _ in range(2)] == [(None, None)] * 2
    rundir.create(tiny(), held)
    with pytest.raises(BusyError, match=r"--name: another process has just begun a run in"):
        rundir.create(tiny(), held)


def test_a_run_is_resumed_by_one_process_and_only_from_a_checkpoint(tiny, held, tmp_path):
    with pytest.raises(CheckpointError, match="expected a checkpoint to resume from in"):
        rundir.claim(tiny(), tmp_path, held, print)
    with pytest.raises(BusyError, match="is at work in it"):
        rundir.claim(tiny(), tmp_path, held, print)
