"""`tresnet bench inversion`: its tables, its record, its errors."""

import pytest
import torch

from tresnet.cli.main import main
from tresnet.measure.read_records import read_records

TINY = ["--batch-size", "2", "--input-size", "32", "--repeats", "1", "--model", "tresnet_t"]
TINY += ["--device", "cpu", "--stages", "1"]


@pytest.fixture(autouse=True)
def without_inductor(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)  # seconds each


def test_tables_and_record(tmp_path, capsys):
    pytest.importorskip("inplace_abn", reason="the inplace-abn package is not installed")
    arguments = ["bench", "inversion", *TINY, "--dtype", "bf16", "--output-dir", str(tmp_path)]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "largest relative error of grad_x"
    start = lines.index("largest relative error of grad_weight")
    table = {line.split()[1]: line.split() for line in lines[start + 2 : start + 8]}
    assert list(table) == ["1", "0.1", "0.01", "0.001", "1e-06", "0"]
    ours, theirs = table["1e-06"][4:6]
    assert float(ours) < 1e-3 < 1 < float(theirs)
    assert any(
        line.split()[:5] == ["conv,", "norm,", "conv", "batchnorm", "2.00"] for line in lines
    )
    assert any(line.split()[:5] == ["conv,", "norm,", "conv", "abn", "1.00"] for line in lines)
    assert any(line.split()[:2] == ["tresnet_t", "inplace_abn"] for line in lines)
    (timed,) = [line.split() for line in lines if " recompute+rebuild " in line]
    assert timed[:5] == ["stage", "1", "channels_last", "bf16", "recompute+rebuild"]
    assert float(timed[5]) + float(timed[6]) == pytest.approx(float(timed[7]), abs=0.11)

    (record,) = read_records(tmp_path)
    assert record.what == "bench_inversion"
    assert record.command.startswith("tresnet bench inversion --batch-size 2")
    assert record.settings["method"]["memory"]["kept"].startswith("unique storages")
    parts = [row["part"] for row in record.rows]
    assert {part: parts.count(part) for part in parts} == {
        "error": 4 * 6 * 2 * 4,  # slopes, gammas, betas, implementations
        "memory": 8,
        "time": 2 * 11,
    }
    assert {row["layout"] for row in record.rows if row["part"] == "time"} == {"channels_last"}


def test_one_part_alone(tmp_path, capsys):
    arguments = ["bench", "inversion", *TINY, "--parts", "memory", "--output-dir", str(tmp_path)]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("network ")
    (record,) = read_records(tmp_path)
    assert {row["part"] for row in record.rows} == {"memory"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "tresnet_y"], "unknown model 'tresnet_y'"),
        (["--input-size", "100"], "input_size divisible by 32, got 100"),
        (["--memory-batch-size", "0"], "memory_batch_size of at least 1, got 0"),
        (["--stages", "5"], "expected stages from 1 to 4, got 5"),
        (["--device", "gpu"], "expected a device such as cpu or cuda:0, got 'gpu'"),
        (["--time-limit-s", "0"], "a time limit above 0 s, got 0"),
    ],
)
def test_bad_input(arguments, message, tmp_path, capsys):
    assert main(["bench", "inversion", *TINY, *arguments, "--output-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not list(tmp_path.glob("*.json"))
