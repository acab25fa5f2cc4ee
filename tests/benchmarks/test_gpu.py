"""Test benchmarks/gpu.py: lines parse, a failure costs no other command, and results are kept."""

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tyro
from PIL import Image

from benchmarks import cudnn_fused, gpu, make_jpegs, ops, profile_step
from tresnet.cli.bench import bench_infer, bench_train
from tresnet.cli.commands import parse
from tresnet.cli.train_eval import parse_train
from tresnet.measure import contenders
from tresnet.measure.runner import Outcome

OPTIONS = {
    f"{script.__name__.rpartition('.')[2]}.py": script.Options
    for script in (cudnn_fused, ops, profile_step)
}


@pytest.mark.parametrize("rehearse", [False, True], ids=["gpu", "rehearsal"])
def test_every_line_is_sound(rehearse, monkeypatch):
    """Check options, cases and paths of files, which need no GPU."""
    timed, none = [], Outcome([], [])
    take = lambda *arguments: timed.append(arguments[:2]) or none  # noqa: E731
    monkeypatch.setattr(contenders, "bench_models", take)
    values, compared = gpu.values_of(rehearse, Path("out"), Path("work")), set()
    for line in gpu.COMMANDS.strip().splitlines():
        _, limit, template = line.split(maxsplit=2)
        assert int(limit) <= 240
        program, *words = shlex.split(
            template.format_map(values).replace(" : ", " --time-limit-s 99 ")
        )
        assert all(Path(word).exists() for word in words if word.endswith(".py"))
        if program != "python":
            continue
        if Path(words[0]).name == "train.py":
            parse_train(words[1:])
        elif Path(words[0]).name in OPTIONS:
            tyro.cli(OPTIONS[Path(words[0]).name], args=words[1:])
        elif words[:2] == ["-m", "tresnet.cli.main"]:
            task = parse(words[2:])
            if task.func in (bench_train, bench_infer):
                task()
                training, cases = timed.pop()
                capability = None if rehearse else (9, 0)
                cases = [case.checked(training, capability) for case in cases]
                compared |= {
                    (training, c.model, c.batch_size, c.step.compute.compile) for c in cases
                }
                steps = [case.step for case in cases if case.ours and not rehearse]
                assert all(step.build.impl == "triton" for step in steps)
                assert all(step.compute.compile == "none" for step in steps)
    if not rehearse:
        sizes = ("m", 256), ("m", 64), ("l", 128), ("xl", 128)
        wanted = {(True, f"tresnet_{size}", n, "none") for size, n in sizes}
        wanted |= {(False, "tresnet_m", n, "none") for n in (1, 16, 256)}
        peers = ("default", 256), ("reduce-overhead", 16), ("reduce-overhead", 1)
        wanted |= {(False, "timm:tresnet_m", n, mode) for mode, n in peers}
        assert wanted <= compared


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Yield a function that runs scripts, named with their limits, as the lines of `COMMANDS`."""

    def start(budget_s=60, **scripts):
        lines = []
        for name, (limit, code, *cases) in scripts.items():
            path = tmp_path / f"{name}.py"
            path.write_text(code)
            lines.append(f"{name} {limit} python {path}{' : ' if cases else ''}{' '.join(cases)}")
        monkeypatch.setattr(gpu, "COMMANDS", "\n".join(lines))
        return gpu.run_all([*scripts], {}, tmp_path, tmp_path, budget_s)

    monkeypatch.setattr(gpu, "GRACE_S", 0.2)
    handlers = {number: signal.getsignal(number) for number in gpu.SIGNALS}
    for number in gpu.SIGNALS:
        signal.signal(number, signal.default_int_handler)
    yield start
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_what_fails_or_hangs_costs_no_other_and_leaves_no_child(run, tmp_path, capsys):
    beside = tmp_path / "beside"
    child = f"import time; time.sleep(1.5); open({str(beside)!r}, 'w')"
    hangs = f"import signal, subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]);"
    hangs += "import time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    works = "import sys; print(sys.argv[1:], sys.stdin.read())"
    left = run(fails=(9, "raise SystemExit(4)"), hangs=(1, hangs), works=(9, works))
    assert left == ["fails: exit status 4", "hangs: out of time"]
    assert (tmp_path / "gpu_works.log").read_text() == "[] \n"
    assert capsys.readouterr().out.splitlines()[-1] == "works: ok, 0 s"
    time.sleep(0.7)
    assert not beside.exists()


def test_the_budget_ends_a_command_and_names_what_is_left_out(run, monkeypatch):
    monkeypatch.setattr(gpu, "LEAST_S", 0.1)
    waits = "import time; time.sleep(60)"
    assert run(1, first=(50, waits), second=(50, waits)) == [
        "first: out of time",
        "second: left out",
    ]


def test_sigterm_lets_the_running_one_end_and_names_the_others(run, tmp_path):
    code = "import os, signal, time; signal.signal(15, lambda *_: (print('record'), exit()));"
    code += "os.kill(os.getppid(), 15); time.sleep(60)"
    table = tmp_path / "runs" / "first"
    table.mkdir(parents=True)
    (table / "log.csv").write_text("epoch\n")
    assert run(first=(60, code), second=(60, code)) == ["first: interrupted", "second: left out"]
    assert (tmp_path / "gpu_first.log").read_text() == "record\n"
    assert (tmp_path / "gpu_run_first.csv").read_text() == "epoch\n"


@pytest.mark.parametrize("dies", [False, True], ids=["error", "signal"])
def test_a_benchmark_starts_again_after_an_error_on_the_gpu(run, tmp_path, dies):
    """The second case breaks the GPU for this process, so the third is measured by another."""
    code = f"""
import json, os, pathlib, sys
limits, cases = sys.argv[1:5], sys.argv[5:]
assert limits[::2] == ["--time-limit-s", "--case-limit-s"]
rows, error = [dict(case=case, status="ok", error=None) for case in cases], "CUDA error: an illegal"
for row in rows[1:]:
    row.update(status="not_begun") if {dies} else row.update(status="failed", error=error + " x")
path = pathlib.Path({str(tmp_path)!r})
(path / f"record_{{len(list(path.glob('record*')))}}.json").write_text(json.dumps(dict(rows=rows)))
print(cases)
if len(rows) > 1:
    os.kill(os.getpid(), 9) if {dies} else exit(1)
"""
    (left,) = run(bench=(50, code, "a", "b", "c"))
    assert left == f"bench: exit status {-9 if dies else 1}"
    assert (tmp_path / "gpu_bench.log").read_text() == "['a', 'b', 'c']\n['c']\n"
    assert [
        row["case"] for row in json.loads((tmp_path / "record_1.json").read_text())["rows"]
    ] == ["c"]


def test_without_a_gpu_nothing_begins(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "IMPORTED", "")
    monkeypatch.setattr(gpu.os, "environ", dict(gpu.os.environ))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main(gpu.Options(("train_m",), output_dir=tmp_path / "new")) == 2
    assert "PyTorch sees none: try --rehearse" in capsys.readouterr().err
    assert gpu.main(gpu.Options(("train_n",), output_dir=tmp_path / "new")) == 2
    assert "got train_n" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_made_images_are_linked_and_counted(tmp_path):
    make_jpegs.make(tmp_path, 2, {"train": 6, "val": 3}, classes=2)
    files = {split: sorted((tmp_path / split).rglob("*.jpg")) for split in ("train", "val")}
    assert {split: len(paths) for split, paths in files.items()} == {"train": 6, "val": 3}
    assert len({path.stat().st_ino for path in files["train"] + files["val"]}) == 2
    with Image.open(files["train"][0]) as image:
        assert image.size == (500, 375)
    assert 80_000 < files["train"][0].stat().st_size < 110_000


@pytest.mark.slow
def test_what_is_imported_before_the_forks_leaves_the_gpu_alone():
    program = f"""
import importlib, torch
def refuse(*args):
    raise AssertionError("CUDA was touched")
torch.cuda._lazy_init = torch._C._cuda_init = torch._C._cuda_getDeviceCount = refuse
for name in {gpu.IMPORTED!r}.split():
    importlib.import_module(name)
try:
    torch.cuda.device_count()
except AssertionError:
    print("refused")
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=gpu.ROOT)


@pytest.mark.slow
@pytest.mark.timeout(600)  # above the budget of gpu.py, which ends by itself
def test_everything_rehearses_without_a_gpu(tmp_path):
    """Takes a minute on one core."""
    command = [sys.executable, gpu.__file__, "--rehearse", "--output-dir", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    kinds = {path.name.split("_cpu")[0] for path in tmp_path.glob("*.json")}
    assert kinds == {"bench_train", "bench_infer", "bench_ops", "bench_cudnn_fused", "memory"}
    tables = {path.name for path in tmp_path.glob("*.csv")}
    assert {"gpu_run_folder.csv", "gpu_run_shards.csv"} <= tables
