"""Test benchmarks/gpu.py: commands parse, and a failed comparison does not stop the others."""

import itertools
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tyro

from benchmarks import gpu
from benchmarks.ops import Options
from tresnet.cli.bench import BenchInfer, BenchTrain
from tresnet.cli.commands import parse


@pytest.mark.parametrize("values", [gpu.GPU, gpu.REHEARSAL], ids=["gpu", "rehearsal"])
def test_every_line_is_sound(values):
    """Check options, cases and paths of files, which need no GPU."""
    parts, compared = [part.values() for part in gpu.PARTS.values()], set()
    assert all(sum(comparison.limit_s for comparison in part) <= 9 * 60 for part in parts)
    for comparison in itertools.chain(*parts):
        words = comparison.arguments({**values, "records": "folder"}, comparison.limit_s)
        if words[0] == "benchmarks/ops.py":
            tyro.cli(Options, args=words[1:]).check()
        if words[:2] != ["-m", "tresnet.cli.main"]:
            assert all(Path(word).exists() for word in words if word.endswith(".py"))
            continue
        task = parse(words[2:])
        if (kind := type(task)) in (BenchTrain, BenchInfer):
            on_gpu = values is gpu.GPU
            capability = (9, 0) if on_gpu else None
            cases = [case.checked(kind is BenchTrain, capability) for case in task.cases()]
            assert cases[0].model.startswith("timm:"), "the base of the ratios"
            compared |= {(kind, case.model.removeprefix("timm:")) for case in cases}
            ours = [case for case in cases if case.ours and on_gpu]
            # torch.compile is used only with impl=plain
            assert all((case.compile == "none") == (case.impl == "triton") for case in ours)
    if values is gpu.GPU:
        wanted = {(BenchTrain, f"tresnet_{size}") for size in ("m", "l", "xl")}
        assert {*wanted, (BenchInfer, "tresnet_m")} <= compared


@pytest.fixture
def parts(monkeypatch):
    """Yield a function that replaces the comparisons by lines of Python."""

    def replace(limit_s=2, **lines):
        own = {k: gpu.Comparison(limit_s, shlex.join(["-c", code])) for k, code in lines.items()}
        monkeypatch.setattr(gpu, "PARTS", {"1": own})
        monkeypatch.setattr(gpu, "NAMES", ("1", *own))

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    yield replace
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_what_fails_or_hangs_costs_no_other_and_leaves_no_child(
    parts, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(gpu, "GRACE_S", 0.2)
    beside = tmp_path / "beside"
    child = f"import time; time.sleep(2.5); open({str(beside)!r}, 'w')"
    hangs = f"import signal, subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]);"
    hangs += "import time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    parts(fails="raise SystemExit(4)", hangs=hangs, works="print('measured')")
    assert gpu.main(gpu.Options(("1",), output_dir=tmp_path)) == 1
    fails, hangs = capsys.readouterr().out.splitlines()[-2:]
    assert fails.startswith("fails: exit status 4, see ")
    assert hangs.startswith("hangs: out of time, see ")
    assert (tmp_path / "gpu_works.log").read_text() == "measured\n"
    time.sleep(0.7)
    assert not beside.exists()


def test_without_a_gpu_nothing_begins(parts, tmp_path, monkeypatch, capsys):
    parts(works="print('measured')")
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    assert gpu.main(gpu.Options(("1",), output_dir=tmp_path / "new")) == 2
    assert "PyTorch sees none: try --rehearse" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_sigterm_lets_the_running_one_end_and_names_the_others(parts, tmp_path, capsys):
    code = "import os, signal, time; signal.signal(15, lambda *_: (print('record'), exit()));"
    code += "os.kill(os.getppid(), 15); time.sleep(60)"
    parts(limit_s=60, first=code, second=code)
    assert gpu.main(gpu.Options(("1",), output_dir=tmp_path)) == 1
    assert capsys.readouterr().out.endswith("\nfirst: interrupted\nsecond: left out\n")
    assert (tmp_path / "gpu_first.log").read_text() == "record\n"


@pytest.mark.slow
def test_a_rehearsal_measures_with_tiny_models(tmp_path):
    """Run one comparison of each kind of `tresnet bench`; other tests check the rest."""
    names = "memory", "infer_m", "largest_batch"
    command = [sys.executable, gpu.__file__, "--rehearse", *names, "--output-dir", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    logs = {path.name: path.read_text()[-2000:] for path in tmp_path.glob("*.log")}
    assert result.returncode == 0, result.stdout + result.stderr + str(logs)
    kinds = {path.name.split("_cpu")[0] for path in tmp_path.glob("*.json")}
    assert kinds == {"bench_train", "bench_infer", "bench_max_batch"}
