"""The matrix of cases, its record, and the bounds, with measurements made up."""

import json
import time

import pytest

from tresnet.cli import memory_matrix
from tresnet.cli.memory_compare import MemoryCompare
from tresnet.cli.memory_matrix import (
    OURS,
    PEERS,
    compare_matrix,
    label,
    matrix_cases,
    mean_error_percent,
    misses,
)
from tresnet.errors import InputError
from tresnet.models.named import check_name


def test_the_matrix_is_the_whole_of_it():
    cases = matrix_cases()
    ours = {(c.name, label(c)) for c in cases if c.name in OURS}
    train = {f"train {o} {p}" for o in ("sgd_momentum", "adamw") for p in ("fp32", "bf16")}
    assert ours == {(n, s) for n in OURS for s in (*train, "infer fp32", "infer bf16")}
    assert len(OURS) == 6
    peers = [c for c in cases if c.name in PEERS]
    assert len(PEERS) >= 10
    assert len(peers) == 2 * len(PEERS)
    assert len({(c.name, label(c)) for c in cases}) == len(cases)
    for name in (*OURS, *PEERS):
        check_name(name)


def test_models_of_the_matrix_can_be_chosen():
    assert {c.name for c in matrix_cases(["tresnet_l"])} == {"tresnet_l"}
    with pytest.raises(InputError, match=r"expected models of the matrix .*got 'timm:resnet18'"):
        matrix_cases(["timm:resnet18"])


def phases(allocated_mib, reserved_mib):
    """What a fresh process says of a case."""
    before = {"device_used_mib": 500.0}
    after = {
        "max_allocated_mib": allocated_mib,
        "reserved_mib": reserved_mib,
        "device_used_mib": reserved_mib + 700,
    }
    return {"phases": {"initial": before, "train": after}}


@pytest.fixture
def predicted(monkeypatch):
    """Every prediction is 100 MiB allocated and 200 reserved."""
    row = {"allocated_mib": 100.0, "reserved_mib": 200.0, "device_total_mib": 800.0, "seconds": 1.0}
    monkeypatch.setattr(memory_matrix, "predict_row", lambda *args: row)


def test_rows_hold_both_and_their_errors(predicted):
    cases = matrix_cases(["timm:resnet50"])
    answers = iter([phases(80, 250), {"error": "not finished after 300 s"}])
    first, second = compare_matrix(cases, lambda case: next(answers))
    assert (first["name"], first["step"]) == ("timm:resnet50", cases[0].step)
    assert first["allocated_error_percent"] == pytest.approx(25)
    assert first["reserved_error_percent"] == pytest.approx(-20)
    assert first["measured"]["device_used_before_mib"] == 500
    assert second["measured"] is None
    assert second["error"] == "not finished after 300 s"
    assert second["allocated_error_percent"] is None
    assert json.dumps([first, second])


def test_cases_are_measured_one_at_a_time_in_order(predicted):
    running, seen = [], []

    def measure(case):
        running.append(case)
        assert len(running) == 1
        time.sleep(0.01)
        seen.append(label(case))
        running.pop()
        return phases(100, 200)

    cases = matrix_cases(["tresnet_t"])
    compare_matrix(cases, measure)
    assert seen == [label(c) for c in cases]


def test_a_failing_prediction_measures_no_more(monkeypatch):
    def fail(*args):
        raise InputError("cannot be faked")

    monkeypatch.setattr(memory_matrix, "predict_row", fail)
    measured = []

    def measure(case):
        measured.append(case)
        time.sleep(0.05)
        return phases(100, 200)

    with pytest.raises(InputError, match="cannot be faked"):
        compare_matrix(matrix_cases(), measure)
    assert len(measured) < 5


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([(1.9, 9.9), (-1.9, -9.9)], []),
        ([(4.9, 0), (0, 0), (0, 0)], []),
        ([(5.1, 0), (0, 0), (0, 0)], ["allocated off by +5.10 %, expected 5.0 %"]),
        ([(-5.1, 0), (0, 0), (0, 0)], ["allocated off by -5.10 %"]),
        ([(0, 10.1)], ["reserved off by +10.10 %, expected 10.0 %"]),
        ([(2.5, 0), (-2.5, 0)], ["allocated: mean error 2.50 %, expected 2.0 %"]),
        ([(None, None)], []),
    ],
)
def test_bounds(errors, expected):
    rows = [
        {"name": "m", "step": {}, "allocated_error_percent": a, "reserved_error_percent": r}
        for a, r in errors
    ]
    found = misses(rows)
    assert len(found) == len(expected)
    assert all(part in line for part, line in zip(expected, found, strict=True))
    assert mean_error_percent([]) is None


def run(tmp_path, monkeypatch, measure, **options):
    monkeypatch.setattr("tresnet.cli.memory_options.measure_in_new_process", measure)
    command = MemoryCompare(
        models=("tresnet_t",), matrix=True, device="cpu", output_dir=tmp_path, **options
    )
    code = command.run(["memory", "compare", "--matrix"])
    (record,) = tmp_path.glob("memory_matrix_*.json")
    return code, json.loads(record.read_text())


def test_the_command_writes_a_record(predicted, tmp_path, monkeypatch, capsys):
    code, record = run(tmp_path, monkeypatch, lambda case, timeout_s: phases(101, 200))
    assert code == 0
    assert record["command"] == "tresnet memory compare --matrix"
    assert record["settings"] == {"workspaces": None}
    assert len(record["rows"]) == 6
    out = capsys.readouterr().out
    assert "train adamw bf16" in out
    assert "mean error 0.99 %" in out


def test_the_command_names_what_is_out_of_bounds(predicted, tmp_path, monkeypatch, capsys):
    code, record = run(tmp_path, monkeypatch, lambda case, timeout_s: phases(50, 200))
    assert code == 1
    assert len(record["rows"]) == 6
    assert "allocated off by +100.00 %, expected 5.0 %" in capsys.readouterr().out


def test_what_time_did_not_allow_is_in_the_record(predicted, tmp_path, monkeypatch, capsys):
    code, record = run(tmp_path, monkeypatch, None, time_limit_s=-1)
    assert code == 1
    assert {row["error"] for row in record["rows"]} == {"no time was left"}
    assert "nothing to compare with" in capsys.readouterr().out


def test_it_compares_with_measurements_only():
    with pytest.raises(InputError, match="--matrix compares with measurements"):
        MemoryCompare(matrix=True, no_measuring=True).run([])
