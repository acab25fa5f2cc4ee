import csv
import json
import sys
import types

import pytest

from tresnet.engine.logs import COLUMNS, RunLog
from tresnet.errors import WriteError


def read(directory):
    with (directory / "log.csv").open(newline="") as file:
        table = list(csv.reader(file))
    lines = (directory / "log.jsonl").read_text().splitlines()
    return table, [json.loads(line) for line in lines]


def test_the_columns_are_those_users_read():
    columns = """phase epoch step lr loss accuracy val_loss val_top1 val_top5 val_map val_f1
        images_per_s data_wait_pct bad_steps allocated_mib reserved_mib max_allocated_mib
        device_used_mib rss_peak_mib elapsed_s"""
    assert list(COLUMNS) == columns.split()


def test_rows_are_written_twice_and_absent_values_are_empty(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # it is not installed
    log = RunLog(tmp_path, [], 0, tensorboard=True)
    log.row(phase="train", epoch=1, step=6, loss=0.123456789, val_loss=float("nan"))
    log.close()
    table, rows = read(tmp_path)
    assert table[0] == list(COLUMNS)
    cells = dict(zip(*table, strict=True))
    assert (cells["phase"], cells["loss"], cells["allocated_mib"]) == ("train", "0.123457", "")
    assert cells["val_loss"] == "nan"
    assert (rows[0]["loss"], rows[0]["val_loss"], rows[0]["allocated_mib"]) == (
        0.123456789,
        None,
        None,
    )
    with pytest.raises(ValueError, match="no such columns"):
        log.row(phase="train", top1=3.0)


@pytest.mark.parametrize("damage", ["rows that come again", "half a row", "binary", "missing"])
def test_going_on_writes_the_rows_of_the_state_whatever_became_of_the_files(tmp_path, damage):
    rows = []
    log = RunLog(tmp_path, rows, 0, tensorboard=False)
    for step in (0, 6, 12):
        log.row(phase="train", epoch=step // 6, step=step, loss=1.0)
    for path in (tmp_path / "log.csv", tmp_path / "log.jsonl"):
        if damage == "half a row":
            path.write_bytes(path.read_bytes()[:-9])
        if damage == "binary":
            path.write_bytes(b"\xff\x00")
        if damage == "missing":
            path.unlink()
    log = RunLog(tmp_path, rows[:2], 6, tensorboard=False)
    log.row(phase="train", epoch=2, step=12, loss=2.0)
    table, found = read(tmp_path)
    assert [row[COLUMNS.index("step")] for row in table] == ["step", "0", "6", "12"]
    assert [(row["step"], row["loss"]) for row in found] == [(0, 1.0), (6, 1.0), (12, 2.0)]


def test_a_log_that_cannot_be_written_is_an_error(tmp_path):
    log = RunLog(tmp_path, [], 0, tensorboard=False)
    (tmp_path / "log.csv").unlink()
    (tmp_path / "log.csv").mkdir()
    with pytest.raises(WriteError, match=r"cannot write .*log\.csv: Is a directory"):
        log.row(phase="train", step=1)


def test_tensorboard_gets_the_numbers_if_it_is_installed(tmp_path, monkeypatch):
    written = []

    class Writer:
        def __init__(self, directory, purge_step):
            written.append((directory, purge_step))

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def close(self):
            written.append("closed")

    tensorboard = types.SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    log = RunLog(tmp_path, [{"phase": "initial", "step": 0}], 3, tensorboard=True)
    log.row(phase="train", epoch=1, step=6, loss=0.5, elapsed_s=3.0)
    log.scalars(7, "update", {"lr": 0.1})
    log.close()
    assert written == [(str(tmp_path), 4), ("epoch/loss", 0.5, 6), ("update/lr", 0.1, 7), "closed"]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_the_numbers_and_knows_a_resumed_run_again(tmp_path, monkeypatch, name):
    told = []

    def init(**options):
        told.append(options)
        log = lambda values, step: told.append((values, step))  # noqa: E731
        return types.SimpleNamespace(log=log, finish=lambda: told.append("finished"))

    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(init=init))
    for _ in range(2):
        log = RunLog(tmp_path, [], 0, tensorboard=False, track=name, config={"lr": 1})
        log.row(phase="train", epoch=1, step=6, loss=0.5, elapsed_s=3.0)
        log.scalars(7, "update", {"lr": 0.1})
        log.close()
    options, *numbers = told[:4]
    assert numbers == [({"epoch/loss": 0.5}, 6), ({"update/lr": 0.1}, 7), "finished"]
    assert told[4:] == told[:4]
    assert (options["config"], options["resume"]) == ({"lr": 1}, "allow")
    assert options.get("dir") == (str(tmp_path) if name == "wandb" else None)
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(init=lambda **_: 1 / 0))
    with pytest.raises(WriteError, match=f"{name} cannot begin .* leave out --track"):
        RunLog(tmp_path, [], 0, tensorboard=False, track=name)
