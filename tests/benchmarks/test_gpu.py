"""benchmarks/gpu.py: its command lines are sound, and no comparison's end costs another."""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tyro

from benchmarks import gpu
from benchmarks.ops import Options
from tresnet.cli.bench import BenchInfer, BenchTrain
from tresnet.cli.commands import parse

SCRIPT = Path(gpu.__file__)
EVERY = {name: one for part in gpu.PARTS.values() for name, one in part.items()}


def arguments(name, values):
    return shlex.split(EVERY[name].command.format_map({**values, "records": "folder"}))


def test_a_part_takes_nine_minutes_at_most():
    for part in gpu.PARTS.values():
        assert sum(comparison.limit_s for comparison in part.values()) <= 9 * 60


@pytest.mark.parametrize("values", [gpu.GPU, gpu.REHEARSAL], ids=["gpu", "rehearsal"])
def test_every_line_is_sound(values):
    """Check all that needs no GPU: options, cases, and that files exist."""
    compared = set()
    for name in EVERY:
        words = arguments(name, values)
        if words[0] == "benchmarks/ops.py":
            tyro.cli(Options, args=words[1:]).check()
        if words[:2] != ["-m", "tresnet.cli.main"]:
            assert all(Path(word).exists() for word in words if word.endswith(".py"))
            continue
        task = parse(words[2:]).task
        if isinstance(task, BenchTrain | BenchInfer):
            training = isinstance(task, BenchTrain)
            cases = [case.checked(training, values is gpu.GPU) for case in task.cases()]
            assert cases[0].model.startswith("timm:"), "the base of the ratios"
            assert {case.impl for case in cases if case.ours} <= {"triton", "reference"}
            assert all(case.compile != "none" or case.impl != "reference" for case in cases) or (
                values is gpu.REHEARSAL
            )
            compared |= {(training, case.model) for case in cases}
    if values is gpu.GPU:
        both = {"tresnet_m", "timm:tresnet_m"}
        alone = {*both, "tresnet_l", "timm:tresnet_l", "tresnet_xl", "timm:tresnet_xl"}
        assert {(False, model) for model in both} | {(True, model) for model in alone} <= compared


@pytest.fixture
def parts(monkeypatch):
    """Comparisons that run lines of Python in place of a benchmark."""

    def made(**lines):
        own = {k: gpu.Comparison(3, shlex.join(["-c", code])) for k, code in lines.items()}
        monkeypatch.setattr(gpu, "PARTS", {"1": own})
        monkeypatch.setattr(gpu, "NAMES", ("1", *own))

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(os, "environ", dict(os.environ))
    yield made
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise SystemExit(4)", "exit status 4"),
        ("import os; os.kill(os.getpid(), 9)", "exit status -9"),
        ("import time; time.sleep(60)", "out of time"),
        ("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)", "out of time"),
    ],
    ids=["fails", "is killed", "hangs", "ignores signals"],
)
def test_what_fails_or_hangs_costs_no_other(code, reason, parts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "GRACE_S", 1)
    parts(first=code, second="print('measured')")
    began_s = time.monotonic()
    assert gpu.main(gpu.Options(("1",), output_dir=tmp_path)) == 1
    assert time.monotonic() - began_s < 10
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"first: {reason}, see ")
    assert (tmp_path / "gpu_second.log").read_text() == "measured\n"


def test_children_of_what_hangs_end_with_it(parts, tmp_path):
    beside = tmp_path / "beside"
    code = f"import time; time.sleep(1); open({str(beside)!r}, 'w')"
    parts(first=f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}])")
    assert gpu.main(gpu.Options(("first",), output_dir=tmp_path)) == 0
    time.sleep(1.5)
    assert not beside.exists()


def test_sigterm_lets_the_running_one_end_and_names_the_others(parts, tmp_path, capsys):
    begun = tmp_path / "gpu_first.log"
    code = "import signal, time; signal.signal(15, lambda *_: (print('record'), exit()));"
    code += "print('begun', flush=True); time.sleep(60)"
    parts(first=code, second=code)

    def stop():
        while not (begun.exists() and begun.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    assert gpu.main(gpu.Options(("1",), output_dir=tmp_path)) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == ["first: interrupted", "second: left out"]
    assert begun.read_text() == "begun\nrecord\n"


@pytest.mark.slow
def test_a_rehearsal_measures_with_tiny_models(tmp_path):
    """One comparison of each kind: the others differ in what test_every_line_is_sound checks."""
    names = "selfcheck", "train_m", "profile", "operations", "kernels", "infer_m", "largest_batch"
    command = [sys.executable, str(SCRIPT), "--rehearse", *names, "--output-dir", str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True)
    logs = {path.name: path.read_text()[-2000:] for path in tmp_path.glob("*.log")}
    assert found.returncode == 0, found.stdout + found.stderr + str(logs)
    kinds = {path.name.split("_cpu")[0] for path in tmp_path.glob("*.json")}
    assert kinds == {"bench_train", "bench_infer", "bench_ops", "bench_max_batch"}
