import csv
import json

import pytest

from tresnet.engine import logs
from tresnet.engine.logs import COLUMNS, RunLog
from tresnet.errors import WriteError


def read(directory):
    with (directory / "log.csv").open(newline="") as file:
        table = list(csv.reader(file))
    lines = (directory / "log.jsonl").read_text().splitlines()
    return table, [json.loads(line) for line in lines]


def test_the_columns_are_those_users_read():
    progress = ["phase", "epoch", "step", "lr", "loss", "accuracy"]
    tested = ["val_loss", "val_top1", "val_top5", "val_map", "val_f1"]
    memory = [
        "allocated_mib",
        "reserved_mib",
        "max_allocated_mib",
        "device_used_mib",
        "rss_peak_mib",
    ]
    assert list(COLUMNS) == [
        *progress,
        *tested,
        "images_per_s",
        "data_wait_pct",
        *memory,
        "elapsed_s",
    ]


def test_rows_are_written_twice_and_absent_values_are_empty(tmp_path):
    log = RunLog(tmp_path, [], 0, tensorboard=False)
    log.row(phase="train", epoch=1, step=6, loss=0.123456789, rss_peak_mib=12.0)
    table, rows = read(tmp_path)
    assert table[0] == list(COLUMNS)
    cells = dict(zip(*table, strict=True))
    assert (cells["phase"], cells["loss"], cells["allocated_mib"]) == ("train", "0.123457", "")
    assert rows[0]["loss"] == 0.123456789
    assert rows[0]["allocated_mib"] is None


def test_what_is_no_number_is_null_in_json_and_nan_in_csv(tmp_path):
    RunLog(tmp_path, [], 0, tensorboard=False).row(phase="train", step=1, val_loss=float("nan"))
    table, rows = read(tmp_path)
    assert rows[0]["val_loss"] is None
    assert dict(zip(*table, strict=True))["val_loss"] == "nan"


def test_an_unknown_column_is_a_mistake_in_the_code(tmp_path):
    with pytest.raises(ValueError, match="no such columns"):
        RunLog(tmp_path, [], 0, tensorboard=False).row(phase="train", top1=3.0)


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

    monkeypatch.setattr(logs, "_summary_writer", lambda: Writer)
    log = RunLog(tmp_path, [{"phase": "initial", "step": 0}], 3, tensorboard=True)
    log.row(phase="train", epoch=1, step=6, loss=0.5, elapsed_s=3.0)
    log.scalars(7, "update", {"lr": 0.1})
    log.close()
    assert written == [
        (str(tmp_path), 4),
        ("epoch/loss", 0.5, 6),
        ("update/lr", 0.1, 7),
        "closed",
    ]


def test_without_tensorboard_the_log_is_written_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "_summary_writer", lambda: None)
    log = RunLog(tmp_path, [], 0, tensorboard=True)
    log.row(phase="train", epoch=1, step=6, loss=0.5)
    log.close()
    assert len(read(tmp_path)[1]) == 1
