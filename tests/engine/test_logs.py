import csv
import json
import os
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from tresnet.engine import logs
from tresnet.engine import train as training
from tresnet.engine.logs import COLUMNS, RunLog, read_rows
from tresnet.engine.state import Progress
from tresnet.engine.train import train
from tresnet.errors import WriteError
from tresnet.measure.memory_meter import MemorySnapshot


def read(directory):
    with (directory / "log.csv").open(newline="") as file:
        table = list(csv.reader(file))
    lines = (directory / "log.jsonl").read_text().splitlines()
    return table, [json.loads(line) for line in lines]


def add(log, epoch, step, **figures):
    """Append a row of the phase train."""
    progress = Progress(epoch=epoch, global_step=step)
    log.phase("train", progress, MemorySnapshot(), 3.0, **figures)


def test_rows_are_written_twice_and_absent_values_are_empty(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # it is not installed
    log = RunLog(tmp_path, [], 0, tiny(tensorboard=True))
    add(log, 1, 6, loss=0.123456789, val_loss=float("nan"))
    log.close()
    table, rows = read(tmp_path)
    assert table[0] == list(COLUMNS)
    cells = dict(zip(*table, strict=True))
    names = ("phase", "loss", "val_loss", "allocated_mib")
    assert [cells[name] for name in names] == ["train", "0.123457", "", ""]
    assert [rows[0][name] for name in names] == ["train", 0.123456789, None, None]
    add(log, 2, 12, surprise=3.0)  # a figure without a column gets one
    table, rows = read(tmp_path)
    assert [row[len(COLUMNS) :] for row in table] == [["surprise"], [""], ["3"]]
    assert rows[1]["surprise"] == 3.0


@pytest.mark.parametrize("name", ["log.jsonl", "log.csv"])
def test_a_row_is_complete_only_when_both_files_have_it(tiny, tmp_path, name):
    """Ignore a row of one file, so that a run killed between the two writes repairs log.csv."""
    log = RunLog(tmp_path, [], 0, tiny())
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(WriteError, match=rf"cannot write .*{name}: .*directory"):
        add(log, 1, 6)
    assert read_rows(tmp_path, 1) == []


@pytest.mark.parametrize(
    ("damage", "kept"),
    [
        (lambda text: text, [0, 6]),  # with a row that will be written again
        (lambda text: text[:-9], [0, 6]),
        (lambda text: text[:-9] + "\n", [0, 6]),
        (lambda text: "{", []),
        (lambda text: "\udcff", []),
        (lambda text: "\0" * 500, []),
        *(
            (lambda text, row=row: text.replace("\n", f"\n{row}\n", 1), [0])
            for row in ("null", "[]", "3", "{}", '{"epoch": "a"}')
        ),
    ],
)
def test_a_resumed_log_has_the_rows_of_its_state_once(tiny, tmp_path, damage, kept):
    assert read_rows(tmp_path, 1) == []
    log = RunLog(tmp_path, [], 0, tiny())
    for step in (0, 6, 12):
        add(log, step // 6, step, loss=1.0)
    path = tmp_path / "log.jsonl"
    path.write_bytes(os.fsencode(damage(path.read_text())))
    log = RunLog(tmp_path, read_rows(tmp_path, 1), 6, tiny())
    add(log, 2, 12, loss=2.0)
    table, found = read(tmp_path)
    assert [row[2] for row in table] == ["step", *map(str, kept), "12"]
    assert [(row["step"], row["loss"]) for row in found] == [*((s, 1.0) for s in kept), (12, 2.0)]


def test_a_log_of_another_version_is_continued(tiny, tmp_path):
    """An older version lacks a column, a newer one has one more."""
    log = RunLog(tmp_path, [], 0, tiny())
    add(log, 1, 6, loss=1.0, set_up_s=5.0)
    path = tmp_path / "log.jsonl"
    row = json.loads(path.read_text()) | {"gradient_norm": 0.25}
    del row["set_up_s"]
    path.write_text(json.dumps(row) + "\n")
    log = RunLog(tmp_path, read_rows(tmp_path, 1), 6, tiny())
    add(log, 2, 12, loss=2.0)
    (header, *lines), (first, _) = read(tmp_path)
    assert first["set_up_s"] is None
    assert header == [*COLUMNS, "gradient_norm"]
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    assert [row["loss"] for row in rows] == ["1", "2"]
    assert [row["set_up_s"] for row in rows] == ["", ""]
    assert [row["gradient_norm"] for row in rows] == ["0.25", ""]


def log_numbers(directory, rows, step, config):
    log = RunLog(directory, rows, step, config)
    add(log, 1, 6, loss=0.5)
    log.scalars(7, "update", {"lr": 0.1})
    log.close()


def test_tensorboard_gets_the_numbers_if_it_is_installed(tiny, tmp_path, monkeypatch):
    writer = Mock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", Mock(SummaryWriter=writer))
    log_numbers(tmp_path, [{"phase": "initial", "step": 0}], 3, tiny(tensorboard=True))
    scalars = [call().add_scalar("epoch/loss", 0.5, 6), call().add_scalar("update/lr", 0.1, 7)]
    assert writer.mock_calls == [call(str(tmp_path), purge_step=4), *scalars, call().close()]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_the_numbers_and_knows_a_resumed_run_again(
    tiny, tmp_path, monkeypatch, name
):
    init = Mock()
    monkeypatch.setitem(sys.modules, name, Mock(init=init))
    for _ in range(2):
        log_numbers(tmp_path, [], 0, tiny(track=name))
    options = init.call_args.kwargs
    numbers = [call().log({"epoch/loss": 0.5}, step=6), call().log({"update/lr": 0.1}, step=7)]
    assert init.mock_calls == 2 * [call(**options), *numbers, call().finish()]
    assert (options["config"]["run"]["track"], options["resume"]) == (name, "allow")
    assert options.get("dir") == (str(tmp_path) if name == "wandb" else None)
    monkeypatch.setitem(sys.modules, name, Mock(init=Mock(side_effect=ValueError)))
    with pytest.raises(WriteError, match=f"{name} cannot begin .* leave out --track"):
        RunLog(tmp_path, [], 0, tiny(track=name))


def test_a_run_draws_itself_at_its_end(tiny, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.delitem(sys.modules, "matplotlib.figure")  # hidden by a fixture
    picture = train(tiny(epochs=1, name="to $2^$", recipe="\x1b")).run_dir / "run.svg"
    assert ET.parse(picture).getroot().tag.endswith("svg")
    assert "to $2^$: tresnet_t, ?" in picture.read_text()

    closed = []
    monkeypatch.setattr(RunLog, "close", lambda log: closed.append(log))
    for error in (WriteError("no space"), ValueError("no backend 'x'")):
        monkeypatch.setattr(training, "draw", Mock(side_effect=error))
        assert train(tiny(epochs=1, name=type(error).__name__)).metrics is not None
        assert f"warning: no picture of the run: {error}" in capsys.readouterr().out
    assert len(closed) == 2


def test_a_picture_names_map_and_draws_every_column(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.delitem(sys.modules, "matplotlib.figure")  # hidden by a fixture
    assert all(len(columns) <= len(logs._COLORS) for _, columns in logs._PANELS)
    row = dict.fromkeys(logs.COLUMNS, 50.0) | {"phase": "train", "val_top1": None}
    logs.draw(tmp_path, [row | {"epoch": epoch} for epoch in (1, 2)], "title")
    texts = re.findall("<!-- (.*?) -->", (tmp_path / "run.svg").read_text())
    for text in ("mAP and F1, %", "mAP", "F1", "top-5", "reserved", "process", "0", "1", "2"):
        assert text in texts
    assert "1.5" not in texts  # a tick between two epochs


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_pages_show_the_line_of_an_epoch_as_it_is_printed(page):
    figures = {
        "loss": 2.1243,
        "accuracy": 30.11,
        "images_per_s": 498.0,
        "data_wait_pct": 19.0,
        "lr": 0.0172,
        "val_loss": 2.3024,
        "val_top1": 10.86,
        "val_top5": 50.42,
    }
    line = logs.printed(figures, MemorySnapshot(rss_peak=1043 * 2**20))
    assert f"\nepoch 1/20  {line}\n" in (Path(__file__).parents[2] / page).read_text()
