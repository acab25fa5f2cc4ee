import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.engine import ddp_train
from tests.engine.images import write_images
from tests.engine.runs import assert_same_run, rows_of, tensors_of
from tresnet.engine import config as configs
from tresnet.engine import resolve as resolving
from tresnet.engine import state
from tresnet.engine.train import train

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("ddp_train.py"))
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
PLAIN = {"mixup": 0.0, "drop_rate": 0.0, "drop_path_rate": 0.0}


def torchrun(*arguments):
    """Two processes on this machine's CPU."""
    return subprocess.run(
        [*LAUNCHER, *map(str, arguments)],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def saved(config, tmp_path):
    path = tmp_path / f"{config.run.name}.json"
    path.write_text(configs.to_json(config))
    return path


@pytest.mark.slow
def test_two_processes_compute_what_one_does_with_the_double_batch(tiny, tmp_path, monkeypatch):
    options = {**PLAIN, "accumulate": 4, "lr": 0.005, "clip_grad": 1.0, "lr_batch": 16}
    monkeypatch.setattr(resolving, "create", ddp_train.create_without_norms)
    one = train(tiny(name="one", batch_size=4, **options))
    config = tiny(name="two", batch_size=2, eval_batch_size=3, **options)
    done = torchrun(SCRIPT, saved(config, tmp_path), "--without-norms")
    assert done.returncode == 0, done.stderr
    assert "2 images per update" not in done.stdout
    assert "8 images per update on each of 2 x cpu, 16 in all" in done.stdout
    assert done.stdout.count("result: top-1") == 1
    two = tmp_path / "runs" / "two"
    assert state.read(two / "last.pt")[0].identity.world == 2
    expected = tensors_of(one.run_dir)
    for name, tensor in tensors_of(two).items():
        # sums over 2 + 2 images instead of 4, in float32, through 4 updates
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6, msg=name)
    for found, wanted in zip(rows_of(two), rows_of(one.run_dir), strict=True):
        for name in ("epoch", "step", "lr", "loss", "accuracy", "val_loss", "val_top1"):
            assert found[name] == pytest.approx(wanted[name], rel=1e-4), name


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_and_the_run_goes_on_bit_for_bit(tiny, tmp_path):
    whole, stopped = (saved(tiny(name=name), tmp_path) for name in ("whole", "stopped"))
    done = torchrun(SCRIPT, whole)
    assert done.returncode == 0, done.stderr
    done = torchrun(SCRIPT, stopped, "--kill", 1, 4, int(signal.SIGTERM))
    assert done.returncode != 0
    assert "stopped by SIGTERM after update 4, saved" in done.stdout
    assert done.stderr.count("exitcode  : 143") == 2
    run_dir = tmp_path / "runs" / "stopped"
    assert state.read(run_dir / "last.pt")[0].progress.update == 4
    done = torchrun(SCRIPT, stopped, "--resume", run_dir)
    assert done.returncode == 0, done.stderr
    assert_same_run(run_dir, tmp_path / "runs" / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_restarts_a_killed_run_which_goes_on_bit_for_bit(tiny, tmp_path, rank):
    options = {"checkpoint_interval_s": 0.0}
    whole, killed = (saved(tiny(name=name, **options), tmp_path) for name in ("whole", "killed"))
    done = torchrun(SCRIPT, whole, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    kill = ("--kill", rank, 8, int(signal.SIGKILL))
    done = torchrun("--max-restarts=1", SCRIPT, killed, "--resume", "auto", *kill)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.name != "whole"] == [
        "killed"
    ]
    assert_same_run(tmp_path / "runs" / "killed", tmp_path / "runs" / "whole")


@pytest.mark.slow
def test_an_image_that_one_process_misses_stops_all_of_them_after_saving(tiny, tmp_path):
    for split, count in (("train", 26), ("val", 11)):
        write_images(tmp_path / "images", split, count)
    options = {"data": str(tmp_path / "images"), "batch_size": 2, "accumulate": 2}
    whole, lacking = (saved(tiny(name=name, **options), tmp_path) for name in ("whole", "lacking"))
    done = torchrun(SCRIPT, whole)
    assert done.returncode == 0, done.stderr
    victim = next((tmp_path / "images" / "train" / "red").iterdir())
    content = victim.read_bytes()
    done = torchrun(SCRIPT, lacking, "--unlink", victim)
    run_dir = tmp_path / "runs" / "lacking"
    update = state.read(run_dir / "last.pt")[0].progress.update
    assert done.returncode != 0
    assert f"{victim.name} cannot be read" in done.stderr
    assert "error: " in done.stderr
    assert f"of update {update}: go on with --resume {run_dir}" in done.stderr
    victim.write_bytes(content)
    done = torchrun(SCRIPT, lacking, "--resume", run_dir)
    assert done.returncode == 0, done.stderr
    assert_same_run(run_dir, tmp_path / "runs" / "whole")


@pytest.mark.slow
def test_evaluation_on_two_processes_counts_each_image_once(tiny, tmp_path, data):
    run_dir = train(tiny(epochs=1)).run_dir
    results = []
    for name, launch in (("two", torchrun), ("one", subprocess_run)):
        output = tmp_path / f"{name}.json"
        done = launch(
            *("eval.py", "--data", data, "--weights", run_dir / "best.safetensors"),
            *("--workers", "0", "--batch-size", "2", "--device", "cpu", "--output", output),
        )
        assert done.returncode == 0, done.stderr
        results.append(json.loads(output.read_text()))
    two, one = results
    assert (two["processes"], one["processes"]) == (2, 1)
    assert two["images"] == one["images"] == 11
    for name in ("top1", "top5", "loss"):
        assert two[name] == pytest.approx(one[name], rel=1e-6)


def subprocess_run(*arguments):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_torchrun_stopped_from_outside_saves_although_it_signals_the_loaders_too(tiny, tmp_path):
    # torchrun sends its signal to the whole process group of each of its processes
    config = tiny(name="stopped", workers=1, epochs=1000)
    run_dir = tmp_path / "runs" / "stopped"
    with subprocess.Popen(
        [*LAUNCHER, SCRIPT, str(saved(config, tmp_path))],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        deadline_s = time.monotonic() + 200
        while not (run_dir / "last.pt").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        before = state.read(run_dir / "last.pt")[0].progress.update
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    assert "stopped by SIGTERM after update" in output, output
    assert "DataLoader worker" not in output
    assert state.read(run_dir / "last.pt")[0].progress.update >= before
