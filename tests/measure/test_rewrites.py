"""The comparison of rewrites: the numbers that issue and README rely on."""

import json
from pathlib import Path

import pytest

from tresnet.cli.main import main
from tresnet.errors import InputError
from tresnet.measure.rewrites import RewriteSettings, compare_branches, compare_convs


@pytest.mark.slow
def test_composed_resnet50_needs_no_more_memory_than_plain():
    rows = compare_convs(RewriteSettings(16, 224, rounds=0))
    assert [row.case for row in rows] == ["plain", "branches", "composed", "recompute"]
    plain, branches, composed, recompute = rows
    assert plain.parameters == 25_557_032
    assert {row.parameters for row in rows[1:]} == {15_866_344}
    assert composed.peak_mib <= 1.05 * plain.peak_mib
    assert recompute.peak_mib <= 1.05 * plain.peak_mib
    assert branches.peak_mib > plain.peak_mib
    assert branches.macs < plain.macs < composed.macs
    assert recompute.macs == branches.macs


def test_a_small_comparison_times_every_case():
    settings = RewriteSettings(2, 6, rounds=2, steps=1)
    rows = compare_branches(settings, groups=3, channels=8)
    assert [row.case for row in rows] == ["loop", "merged", "merged, fastest ways"]
    assert len({row.parameters for row in rows}) == 1
    assert rows[0].ratio_to_first == 1
    assert all(row.step_p50_ms is not None and row.step_p50_ms > 0 for row in rows)
    assert "merged.body.2: " in rows[2].note


def test_the_command_prints_a_table_and_writes_a_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    options = ["--groups", "2", "--channels", "4", "--input-size", "5", "--batch-size", "2"]
    assert (
        main(["bench", "branches", *options, "--rounds", "0", "--output-dir", str(tmp_path)]) == 0
    )
    assert "GMACs/image" in capsys.readouterr().out
    (path,) = tmp_path.glob("bench_branches_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"] for row in rows] == ["loop", "merged"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RewriteSettings(batch_size=0), "batch_size of at least 1, got 0"),
        (lambda: RewriteSettings(rounds=-1), "rounds of at least 0, got -1"),
        (lambda: compare_branches(RewriteSettings(), 0, 8), "groups of at least 1"),
        (lambda: compare_branches(RewriteSettings(), 2, 7), "even channels, got 2 and 7"),
        (lambda: compare_branches(RewriteSettings(device="tpu", rounds=0)), "got 'tpu'"),
        (
            lambda: compare_branches(RewriteSettings(1, 1, rounds=0), 2, 4),
            r"loop cannot train on an input of \(1, 4, 1, 1\)",
        ),
    ],
)
def test_impossible_settings_are_refused(call: object, message: str):
    with pytest.raises(InputError, match=message):
        call()
