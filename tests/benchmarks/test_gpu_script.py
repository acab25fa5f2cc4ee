"""benchmarks/gpu.sh: its command lines are sound, and no stage's end costs another."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path

import pytest

from tresnet.cli.bench import BenchInfer, BenchTrain
from tresnet.cli.commands import parse

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.sh"
PARTS = {
    "1": ["kernels", "eager_256", "eager_128", "ops", "profile_eager", "graphs", "report"],
    "2": ["warm_ml", "train_m", "train_l", "profile_compiled", "report"],
    "3": ["warm_xl", "train_xl", "warm_infer", "infer", "memory", "max_batch", "report"],
}

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")


def start(folder, *arguments, python=sys.executable, **environment):
    environment |= {"PYTHON": str(python), "RECORDS": f"{folder}/records", "REPORT": str(folder)}
    return subprocess.Popen(
        ["bash", str(SCRIPT), *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result_of(folder, *arguments, **keywords):
    process = start(folder, *arguments, **keywords)
    out, error = process.communicate(timeout=280)
    return process.returncode, out, error


@pytest.fixture
def stub(tmp_path):
    """A Python that notes its arguments and then does `action` in bash, where they match `when`."""

    def made(action="true", when="*"):
        path = tmp_path / "python"
        lines = [f'echo "$@" >>{tmp_path}/argv', f'case "$*" in {when}) {action};; esac']
        path.write_text("\n".join(["#!/usr/bin/env bash", *lines, ""]))
        path.chmod(0o755)
        return path

    return made


def stages_in(out):
    return [line.split()[1].strip(",") for line in out.splitlines() if ", at most " in line]


def packed(folder, name):
    """The files of a part's archive."""
    with tarfile.open(folder / "records" / f"gpu_{name}.tar.gz") as archive:
        files = [member for member in archive.getmembers() if member.isfile()]
        return {member.name: archive.extractfile(member).read() for member in files}


def test_other_names_are_refused(tmp_path):
    code, _, error = result_of(tmp_path, "--rehearse", "train_s")
    assert code == 2
    assert error.startswith("expected parts out of 1 2 3, or stages out of kernels eager_256 ")
    assert result_of(tmp_path, "1", TOTAL_S="soon")[0] == 2


@pytest.mark.slow
def test_the_command_lines_for_a_gpu_are_sound(tmp_path, stub):
    """Every case of the real script passes the checks without a GPU; the baseline comes first."""
    code, out, _ = result_of(tmp_path, python=stub())
    assert code == 0
    assert stages_in(out) == list(itertools.chain(*PARTS.values()))
    lines = [line.split() for line in out.splitlines() if ", at most " in line]
    limits = {line[1].strip(","): int(line[4]) for line in lines}
    for stages in PARTS.values():
        assert sum(limits[stage] for stage in stages) <= 530 < 9 * 60
    lines = [line.split() for line in (tmp_path / "argv").read_text().splitlines()]
    benches = [line[2:] for line in lines if line[:3] == ["-m", "tresnet.cli.main", "bench"]]
    tasks = [parse(line).task for line in benches]
    assert Counter(type(task).__name__ for task in tasks) == {
        "BenchOps": 1,
        "BenchTrain": 9 + 7,  # compiled beforehand, then measured
        "BenchInfer": 5 + 1,
        "BenchMaxBatch": 1,
    }
    compared = set()
    for task in tasks:
        if isinstance(task, BenchTrain | BenchInfer):
            training = isinstance(task, BenchTrain)
            cases = [case.checked(training, on_gpu=True) for case in task.cases()]
            assert len(cases) == 1 or cases[0].model.startswith("timm:")
            compared |= {(training, case.model) for case in cases}
    peers = ("tresnet_m", "timm:tresnet_m", "torchvision:resnet50")
    assert set(itertools.product((True, False), peers)) <= compared
    assert {(True, "timm:tresnet_l"), (True, "timm:tresnet_xl")} <= compared
    others = [line for line in lines if line[2:3] != ["bench"]]
    assert Counter(line[0] for line in others) == {
        "-m": 1,
        "benchmarks/profile_step.py": 2,
        "benchmarks/tables.py": 3,
    }
    assert {f"./{stage}/log.txt" for stage in PARTS["1"]} <= packed(tmp_path, "part1").keys()


@pytest.mark.parametrize(
    "action",
    [
        "exit 1",
        "kill -KILL $$",
        "exec sleep 60",  # until its limit, when it ends at SIGTERM
        pytest.param("trap '' TERM; sleep 60 & wait; wait", marks=pytest.mark.slow),  # deaf to it
    ],
)
def test_a_stage_that_fails_hangs_or_is_killed_costs_no_other(action, tmp_path, stub):
    python, began_s = stub(action, when="*bench?ops*"), time.perf_counter()
    code, out, _ = result_of(
        tmp_path, "--rehearse", "eager_256", "ops", "report", python=python, TOTAL_S="25"
    )
    assert code == 1
    assert stages_in(out) == ["eager_256", "ops", "report"]
    assert out.splitlines()[-1] == "not everything measured in: ops"
    assert len(list((tmp_path / "records").glob("gpu_*.tar.gz"))) == 3
    assert time.perf_counter() - began_s < 30


def test_a_signal_ends_the_stage_and_leaves_its_output(tmp_path, stub):
    process = start(
        tmp_path, "--rehearse", "1", python=stub("echo begun; exec sleep 60", when="*train*")
    )
    for line in process.stdout:
        if line == "begun\n":
            break
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "left out for want of time: eager_128 ops profile_eager graphs report" in out
    assert packed(tmp_path, "part1")["./eager_256/log.txt"] == b"begun\n"


@pytest.mark.slow
def test_a_rehearsal_measures_with_tiny_models(tmp_path):
    """A stage without kernels: interpreted, those of the others take minutes."""
    code, out, error = result_of(tmp_path, "--rehearse", "infer", "report")
    assert code == 0, out + error
    (path,) = (tmp_path / "records").glob("*.json")
    record = json.loads(path.read_text())
    assert record["what"] == "bench_infer"
    assert {row["status"] for row in record["rows"]} == {"ok"}
    assert "### CPU" in (tmp_path / "report.md").read_text()
