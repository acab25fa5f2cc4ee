"""benchmarks/gpu.sh: every one of its command lines, rehearsed on the CPU."""

import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tresnet.cli.bench import BenchInfer, BenchTrain
from tresnet.cli.main import _parse
from tresnet.measure.read_records import read_records

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.sh"
STAGES = ["ops", "warm", "train_m", "train_l", "train_xl", "infer", "max_batch", "memory"]
STAGES += ["report"]
PEERS = ("tresnet_m", "timm:tresnet_m", "torchvision:resnet50")

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
    assert result.stderr == f"expected stages out of {' '.join(STAGES)} tiles, got train_s\n"


def test_a_failing_stage_is_named_and_the_others_run(tmp_path: Path):
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "torn.json").write_text("{")
    result = rehearse(tmp_path, "report")
    assert result.returncode == 1
    assert "torn.json: expected a record in JSON" in result.stderr
    assert result.stdout.splitlines()[-1] == "not everything measured in: report"
    assert not (tmp_path / "report.md").exists()


def test_the_command_lines_for_a_gpu_are_sound(tmp_path: Path):
    """Every case of the real script passes the checks that need no GPU."""
    python, log = tmp_path / "python", tmp_path / "argv"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] || echo "$@" >> {log}\n')
    python.chmod(0o755)
    environment = {"PYTHON": str(python), "RECORDS": f"{tmp_path}/records", "REPORT": str(tmp_path)}
    subprocess.run(["bash", str(SCRIPT)], env={**os.environ, **environment}, check=True, timeout=60)
    lines = [line.split() for line in log.read_text().splitlines()]
    assert all(line[:3] == ["-m", "tresnet.cli.main", "bench"] for line in lines)
    tasks = [_parse(line[2:]).task for line in lines]
    assert Counter(type(task).__name__ for task in tasks) == {
        "BenchOps": 1,
        "BenchTrain": 8 + 4,  # compiled beforehand, then measured
        "BenchInfer": 6 + 1,
        "BenchMaxBatch": 1,
        "BenchReport": 1,
    }
    compared = []
    for task in tasks:
        if isinstance(task, BenchTrain | BenchInfer):
            training = isinstance(task, BenchTrain)
            for case in task.cases(task.batch_size):
                if case.norm == "inplace_abn":
                    assert (case.dtype, case.channels_last, case.compile) == ("fp16", False, "none")
                else:
                    case.checked(training)
                compared.append((training, case.model))
    for training, model in itertools.product((True, False), PEERS):
        assert (training, model) in compared
    assert {(True, "timm:tresnet_l"), (True, "timm:tresnet_xl")} <= set(compared)


@pytest.mark.slow
def test_other_tiles_are_measured_beside_those_in_use(tmp_path: Path):
    result = rehearse(tmp_path, "tiles")
    assert result.returncode == 0, result.stdout + result.stderr
    (record,) = read_records(tmp_path / "records")
    contenders = {row["contender"] for row in record.rows}
    assert {"copy", "triton", "triton@warps=8", "triton@blur_tile=512"} <= contenders
    assert "eager" not in contenders
    for row in record.rows:
        assert row["status"] == ("ok" if row["contender"] == "copy" else "left_out")


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
    package = importlib.util.find_spec("inplace_abn") is not None
    for record in records:
        for row in record.rows:
            absent = row.get("contender") == "triton"
            assert row["status"] == ("left_out" if absent else "ok"), (record.name, row)
    norms = {row.get("norm") for record in records for row in record.rows}
    assert ("inplace_abn" in norms) is package
    assert "### CPU" in (tmp_path / "report.md").read_text()
    assert list(tmp_path.glob("memory_cpu-*.svg"))
