"""benchmarks/gpu.sh: every one of its command lines, rehearsed on the CPU."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tresnet.measure.read_records import read_records

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.sh"
STAGES = ["ops", "warm", "train_m", "train_l", "train_xl", "infer", "max_batch", "memory", "report"]

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")


def rehearse(folder: Path, *stages: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHON": sys.executable, "RECORDS": f"{folder}/records", "REPORT": str(folder)}
    return subprocess.run(
        ["bash", str(SCRIPT), "--rehearse", *stages],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_unknown_stages_are_refused(tmp_path: Path):
    result = rehearse(tmp_path, "train_s")
    assert result.returncode == 2
    assert result.stderr == f"expected stages out of {' '.join(STAGES)}, got train_s\n"


def test_a_failing_stage_is_named_and_the_others_run(tmp_path: Path):
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "torn.json").write_text("{")
    result = rehearse(tmp_path, "report")
    assert result.returncode == 1
    assert "torn.json: expected a record in JSON" in result.stderr
    assert result.stdout.splitlines()[-1] == "not everything measured in: report"
    assert not (tmp_path / "report.md").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_rehearsal(tmp_path: Path):
    result = rehearse(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    for stage in STAGES:
        assert f"--- {stage}, at most" in result.stdout
    assert "left out for want of time" not in result.stdout
    records = read_records(tmp_path / "records")
    assert Counter(record.what for record in records) == {
        "bench_ops": 1,
        "bench_train": 4,  # M, L, XL, and memory over batches
        "bench_infer": 1,
        "bench_max_batch": 1,
    }
    for record in records:
        for row in record.rows:
            without_gpu = row.get("contender") == "triton"
            assert row["status"] == ("left_out" if without_gpu else "ok"), (record.name, row)
    package = importlib.util.find_spec("inplace_abn") is not None
    norms = {row.get("norm") for record in records for row in record.rows}
    assert ("inplace_abn" in norms) is package
    assert "### CPU" in (tmp_path / "report.md").read_text()
    assert list(tmp_path.glob("memory_cpu-*.svg"))
