"""Test benchmarks/gpu.py: commands parse, and a failed task does not stop the others."""

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tyro
from PIL import Image

from benchmarks import gpu, gpu_timings, make_jpegs, profile_step
from tresnet.cli.bench import BenchInfer, BenchTrain
from tresnet.cli.commands import parse
from tresnet.cli.train_eval import parse_train

WORK, OUT = Path("work"), Path("out")


def words_of(rehearse):
    """Yield the words of each command, without Python's own."""
    values = {**gpu.values_of(rehearse, OUT, WORK), "sanitizer": ""}
    phases = (gpu.CORRECTNESS, gpu.TRAINING)
    tasks = itertools.chain(*(lane.values() for phase in phases for lane in phase.values()))
    for task in tasks:
        yield shlex.split(task.command.format_map(values))[1:]
    for _, command in gpu.TIMINGS.values():
        yield ["-m", "tresnet.cli.main", *shlex.split(command.format_map(values))]


@pytest.mark.parametrize("rehearse", [False, True], ids=["gpu", "rehearsal"])
def test_every_line_is_sound(rehearse):
    """Check options, cases and paths of files, which need no GPU."""
    compared, compiled, timed = set(), set(), set()
    for words in words_of(rehearse):
        assert all(Path(word).exists() for word in words if word.endswith(".py"))
        if Path(words[0]).name == "train.py":
            parse_train(words[1:])
        if words[:3] == ["-m", "tresnet.cli.main", "profile"]:
            tyro.cli(profile_step.Options, args=words[3:])
        elif words[:2] == ["-m", "tresnet.cli.main"]:
            task = parse(words[2:])
            if (kind := type(task)) in (BenchTrain, BenchInfer):
                capability = None if rehearse else (9, 0)
                cases = [case.checked(kind is BenchTrain, capability) for case in task.cases()]
                assert cases[0].model.startswith("timm:"), "the base of the ratios"
                compared |= {(kind, c.model, c.batch_size, c.step.compute.compile) for c in cases}
                warms = task.output_dir.name == "warm"
                where = compiled if warms else timed
                where |= {(kind, case) for case in cases if case.step.compute.compile != "none"}
                ours = [case for case in cases if case.ours and not rehearse]
                steps = [case.step for case in ours]
                assert all(step.build.impl == "triton" for step in steps)
                assert all(step.compute.compile == "none" for step in steps)
    assert timed == compiled  # no timing waits for a compilation
    if not rehearse:
        sizes = ("m", 256), ("m", 64), ("l", 128), ("xl", 128)
        wanted = {(BenchTrain, f"tresnet_{size}", n, "none") for size, n in sizes}
        wanted |= {(BenchInfer, "tresnet_m", n, "none") for n in (1, 16, 256)}
        peers = ("default", 256), ("reduce-overhead", 16), ("reduce-overhead", 1)
        wanted |= {(BenchInfer, "timm:tresnet_m", n, mode) for mode, n in peers}
        assert wanted <= compared


def test_a_call_takes_less_than_nine_minutes():
    assert sum(gpu.LIMITS_S.values()) <= 9 * 60
    for phase in ("correctness", "training"):
        for lane in gpu.PHASES[phase].values():
            assert all(task.limit_s <= gpu.LIMITS_S[phase] for task in lane.values())
    assert sum(task.limit_s for task in gpu.TRAINING["training"].values()) <= 110


@pytest.fixture
def phases(monkeypatch):
    """Yield a function that replaces the lanes of a phase by lines of Python."""

    def replace(limit_s=2, **lanes):
        own = {
            lane: {
                name: gpu.Task(limit_s, shlex.join([sys.executable, "-c", code]))
                for name, code in tasks.items()
            }
            for lane, tasks in lanes.items()
        }
        monkeypatch.setattr(gpu, "PHASES", {"correctness": own})
        monkeypatch.setattr(gpu, "NAMES", ("correctness", *itertools.chain(*own.values())))

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    yield replace
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_what_fails_or_hangs_costs_no_other_and_leaves_no_child(
    phases, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(gpu, "GRACE_S", 0.2)
    beside = tmp_path / "beside"
    child = f"import time; time.sleep(2.5); open({str(beside)!r}, 'w')"
    hangs = f"import signal, subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]);"
    hangs += "import time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    phases(a={"fails": "raise SystemExit(4)", "works": "print('measured')"}, b={"hangs": hangs})
    assert gpu.main(gpu.Options(("correctness",), output_dir=tmp_path)) == 1
    fails, hangs = capsys.readouterr().out.splitlines()[-2:]
    assert fails.startswith("fails: exit status 4, see ")
    assert hangs.startswith("hangs: out of time, see ")
    assert (tmp_path / "gpu_works.log").read_text() == "measured\n"
    time.sleep(0.7)
    assert not beside.exists()


def test_tasks_are_chosen_by_name_and_a_missing_program_is_named(phases, tmp_path, capsys):
    phases(a={"first": "print(1)", "second": "print(2)"}, b={"third": "print(3)"})
    lanes = gpu.PHASES["correctness"]
    lanes["b"]["third"] = gpu.Task(2, "no-such-program")
    assert gpu.main(gpu.Options(("second", "third"), output_dir=tmp_path)) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("third: no-such-program is not inst")
    assert [path.name for path in tmp_path.glob("*.log")] == ["gpu_second.log"]
    assert gpu.main(gpu.Options(("fourth",), output_dir=tmp_path)) == 2


def test_without_a_gpu_nothing_begins(phases, tmp_path, monkeypatch, capsys):
    phases(a={"works": "print('measured')"})
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    assert gpu.main(gpu.Options(("correctness",), output_dir=tmp_path / "new")) == 2
    assert "PyTorch sees none: try --rehearse" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_sigterm_lets_the_running_ones_end_and_names_the_others(phases, tmp_path, capsys):
    code = "import os, signal, time; signal.signal(15, lambda *_: (print('record'), exit()));"
    code += f"os.kill({os.getpid()}, 15); time.sleep(60)"
    phases(limit_s=60, a={"first": code, "second": code})
    assert gpu.main(gpu.Options(("correctness",), output_dir=tmp_path)) == 1
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert first.startswith("first: interrupted")
    assert second == "second: left out"
    assert (tmp_path / "gpu_first.log").read_text() == "record\n"


def test_all_timings_are_made_in_one_process(tmp_path, monkeypatch, capsys):
    called = []
    monkeypatch.setattr(gpu_timings.cli, "main", lambda words: called.append(words) or 0)
    monkeypatch.setattr(gpu_timings.profile_step, "main", lambda options: 3)
    values = gpu.values_of(True, tmp_path, tmp_path)
    session = gpu.Session(values, tmp_path, tmp_path, 1)
    ((_, lane),) = session.timing_process(["train_m", "profile", "infer_m"]).items()
    module, plan = shlex.split(lane["timings"].command.format_map(values))[-2:]
    assert module == "benchmarks.gpu_timings"
    assert gpu_timings.main(plan) == 1
    assert capsys.readouterr().out.endswith("profile: exit status 3\n")
    assert [words[:2] for words in called] == [["bench", "train"], ["bench", "infer"]]
    assert called[0][-4::2] == ["--time-limit-s", "--case-limit-s"]
    called.clear()
    late = gpu_timings.run_all([("late", 90, ["bench"])], limit_s=20)
    assert (late, called) == (["late: left out, because 20 s were left"], [])


def test_a_timing_rehearses_without_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    values = gpu.values_of(True, tmp_path, tmp_path)
    _, command = gpu.TIMINGS["train_l"]
    timing = ("train_l", 60, shlex.split(command.format_map(values)))
    assert gpu_timings.run_all([timing], limit_s=600) == []
    (record,) = (json.loads(path.read_text()) for path in tmp_path.glob("bench_train_*.json"))
    assert [row["status"] for row in record["rows"]] == ["ok", "ok"]


def test_made_images_are_linked_and_counted(tmp_path):
    make_jpegs.make(tmp_path, 2, {"train": 6, "val": 3}, classes=2)
    files = {split: sorted((tmp_path / split).rglob("*.jpg")) for split in ("train", "val")}
    assert {split: len(paths) for split, paths in files.items()} == {"train": 6, "val": 3}
    assert len({path.stat().st_ino for path in files["train"] + files["val"]}) == 2
    with Image.open(files["train"][0]) as image:
        assert image.size == (500, 375)
    assert 80_000 < files["train"][0].stat().st_size < 110_000


@pytest.mark.slow
def test_everything_rehearses_without_a_gpu(tmp_path):
    """Takes three minutes on two cores."""
    command = [sys.executable, gpu.__file__, "--rehearse", "--output-dir", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    kinds = {path.name.split("_cpu")[0] for path in tmp_path.glob("*.json")}
    assert kinds == {"bench_train", "bench_infer", "memory_study"}
    assert {path.name for path in tmp_path.glob("*.csv")} == {
        "train_jpeg_folder.csv",
        "train_jpeg_shards.csv",
    }
