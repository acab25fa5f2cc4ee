"""What runs left behind: listed, compared and drawn, whatever became of one of them."""

import json
import re
import sys
import xml.etree.ElementTree as ET

import pytest

from tresnet import files
from tresnet.cli.main import main
from tresnet.engine import config as configs
from tresnet.engine.logs import COLUMNS
from tresnet.engine.train import train


@pytest.fixture
def undrawn():
    """Here runs are drawn."""


def write(runs, name, tiny, epochs, top1=(), **changes):
    """A run's directory as train.py leaves it."""
    directory = runs / name
    directory.mkdir(parents=True)
    config = tiny(name=name, epochs=epochs, **changes)
    (directory / "config.json").write_text(configs.to_json(config))
    rows = [dict.fromkeys(COLUMNS) | {"phase": "initial", "epoch": 0, "step": 0}]
    for epoch, score in enumerate(top1, start=1):
        figures = {"loss": 2.0 / epoch, "val_top1": score, "images_per_s": 100.0 * epoch}
        rows.append(dict.fromkeys(COLUMNS) | {"phase": "train", "epoch": epoch} | figures)
    if len(top1) == epochs:
        rows.append(rows[-1] | {"phase": "final", "elapsed_s": 12.0})
    (directory / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


@pytest.fixture
def runs(tiny, tmp_path):
    place = tmp_path / "many"
    write(place, "a", tiny, 3, (50.0, 70.5, 60.25))
    write(place, "b", tiny, 3, (40.0,), lr=0.5)
    write(place, "c", tiny, 3, model="tresnet_s")
    return place


def table(text):
    return [line.split() for line in text.splitlines()]


def test_runs_are_listed_as_they_are_at_this_moment(runs, capsys):
    with files.lock(runs / "b"):
        assert main(["runs", "list", str(runs)]) == 0
    assert table(capsys.readouterr().out)[1:] == [
        ["a", "digits", "tresnet_t", "3/3", "70.50", "300", "finished"],
        ["b", "digits", "tresnet_t", "1/3", "40.00", "100", "running"],
        ["c", "digits", "tresnet_s", "0/3", "-", "-", "stopped"],
    ]


def test_a_comparison_has_what_differs_and_what_came_of_it(runs, capsys):
    assert main(["runs", "compare", str(runs / "b"), str(runs / "a")]) == 0
    assert table(capsys.readouterr().out) == [
        ["b", "a"],
        ["--lr", "0.5", "0.02"],
        ["epochs", "1", "3"],
        ["best", "top-1", "40.00", "70.50"],
        ["loss", "2.0000", "0.6667"],
        ["images/s", "100", "300"],
        ["elapsed", "s", "-", "12"],
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("log.jsonl", b'{"phase": "tr', "expected rows of JSON in .*jsonl, got JSON.* at line 1"),
        ("log.jsonl", b"[1]", "got ValueError at line 1"),
        ("log.jsonl", b"3", "got TypeError at line 1"),
        ("log.jsonl", b"\xff", "got UnicodeDecodeError"),
        ("config.json", b"{", r"config\.json is not JSON"),
    ],
)
def test_a_damaged_run_is_named_and_the_others_are_shown(runs, capsys, name, content, message):
    (runs / "b" / name).write_bytes(content)
    assert main(["runs", "list", str(runs)]) == 1
    shown = capsys.readouterr()
    assert [line[0] for line in table(shown.out)[1:]] == ["a", "c"]
    assert len(shown.err.splitlines()) == 1
    assert re.search(message, shown.err)


def test_a_run_is_called_as_its_directory_is(runs, capsys, monkeypatch):
    path = (runs / "b").rename(runs / "to $2^$\n\x1b\udcff")
    config = path / "config.json"
    config.write_text(config.read_text().replace('"tresnet_t"', "null"))
    monkeypatch.chdir(path)
    assert main(["runs", "list", ".", "../a"]) == 0
    assert table(capsys.readouterr().out)[1][:4] == ["to", "$2^$???", "digits", "-"]
    pytest.importorskip("matplotlib")
    assert main(["runs", "show", "."]) == 0
    assert "to $2^$???" in (path / "run.svg").read_text()
    assert ET.parse(path / "run.svg")


def test_a_place_without_runs_is_refused(tmp_path, capsys):
    assert main(["runs", "list", str(tmp_path)]) == 2
    assert "expected the directory of a run, or of several" in capsys.readouterr().err


def test_pictures_are_drawn_of_runs_that_have_an_epoch(runs, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    assert main(["runs", "show", str(runs)]) == 1
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [str(runs / name / "run.svg") for name in "ab"]
    assert "expected a whole epoch in the log of" in shown.err
    assert ET.parse(runs / "a" / "run.svg").getroot().tag.endswith("svg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["runs", "show", str(runs / "a")]) == 1
    assert "tresnet[plot]" in capsys.readouterr().err


def test_a_run_draws_itself_at_its_end(tiny):
    pytest.importorskip("matplotlib")
    picture = train(tiny(epochs=1)).run_dir / "run.svg"
    assert "finished" in picture.read_text()
