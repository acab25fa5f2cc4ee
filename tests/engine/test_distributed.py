import csv
import datetime
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import run

from tests.engine import ddp_train
from tests.engine.conftest import config_on
from tests.engine.runs import (
    CLASSES,
    assert_same_run,
    eval_main,
    rows_of,
    tensors_of,
)
from tests.forks import run_forked
from tests.toys import smallest
from tresnet.checkpoints.save import save_checkpoint
from tresnet.engine import config as configs
from tresnet.engine import distributed, state
from tresnet.engine.distributed import StopRequest
from tresnet.engine.resolve import agreed
from tresnet.engine.train import train
from tresnet.errors import ConfigError

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("ddp_train.py"))
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
PLAIN = {"mixup": 0.0, "drop_rate": 0.0, "drop_path_rate": 0.0}


def forked(*arguments, processes=2):
    """Start processes as `torchrun` does, but as forks with torch imported."""
    words = ["--standalone", f"--nproc-per-node={processes}", "--run-path", "--start-method=fork"]
    words += map(str, arguments)
    return run_forked(run.main, words, folder=ROOT, OMP_NUM_THREADS="1")


def saved(config, tmp_path):
    path = tmp_path / f"{config.run.name}.json"
    path.write_text(configs.to_json(config))
    return path


SHARED = {**PLAIN, "accumulate": 4, "lr": 0.005, "clip_grad": 1.0, "lr_batch": 16}


@pytest.fixture
def one(tiny, monkeypatch):
    """Run one process without norms, so that micro-batches do not change the gradient."""
    ddp_train.make_without_norms(monkeypatch.setattr)
    return train(tiny(name="one", batch_size=4, **SHARED)).run_dir


def assert_same_curve(run_dir, one):
    """Check the losses and weights of 4 optimizer steps up to the order of float32 sums."""
    expected = tensors_of(one)
    for name, tensor in tensors_of(run_dir).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6, msg=name)
    for row, other in zip(rows_of(run_dir), rows_of(one), strict=True):
        for name in ("epoch", "step", "lr", "loss", "accuracy", "val_loss", "val_top1"):
            assert row[name] == pytest.approx(other[name], rel=1e-5), name


@pytest.mark.slow
def test_a_run_goes_on_with_other_numbers_of_processes(tiny, tmp_path, one):
    """Resume 2 processes as 4 in the first epoch and as 1 in the second, on the same images."""
    config, run_dir = tiny(name="moved", batch_size=2, **SHARED), tmp_path / "runs" / "moved"
    start = (SCRIPT, saved(config, tmp_path), "--without-norms", "--resume", "auto", "--kill", 1)
    done = forked(*start, 1, int(signal.SIGTERM))
    assert "stopped by SIGTERM after step 1, saved" in done.stdout, done.stderr
    assert done.stdout.count("8 images per step on each of 2 x cpu, 16 in all") == 1
    assert "exitcode  : 143" in done.stderr
    done = forked(*start, 3, int(signal.SIGTERM), processes=4)
    assert "on 4 a step is 2 x 2 images on each" in done.stdout, done.stderr
    assert "stopped by SIGTERM after step 3, saved" in done.stdout, done.stderr
    train(config, resume=run_dir)
    assert state.read(run_dir / "last.pt").identity.world_size == 2
    assert_same_curve(run_dir, one)


@pytest.mark.slow
def test_two_processes_draw_and_thaw_as_one(tiny, tmp_path, monkeypatch):
    """Stop two processes before and after they thaw, and compare with one that never stopped."""
    ddp_train.make_without_norms(monkeypatch.setattr)
    options = SHARED | {"freeze_epochs": 1, "sampler": "balanced", "epochs": 3, "layer_decay": 0.9}
    one = train(tiny(name="one", batch_size=4, **options)).run_dir
    config = tiny(name="two", batch_size=2, **options)
    start = (SCRIPT, saved(config, tmp_path), "--without-norms", "--resume", "auto")
    for number in (1, 4):
        done = forked(*start, "--kill", 1, number, int(signal.SIGTERM))
        assert f"stopped by SIGTERM after step {number}, saved" in done.stdout, done.stderr
    done = forked(*start)
    assert done.returncode == 0, done.stderr
    assert_same_curve(tmp_path / "runs" / "two", one)


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """The directory of a run of two processes from its beginning to its end."""
    runs = tmp_path_factory.mktemp("finished")
    done = forked(SCRIPT, saved(config_on(data, runs), runs))
    assert done.returncode == 0, done.stderr
    return runs / "run"


def test_processes_meet_under_a_name_of_their_own_whatever_ended_ones_left_in_the_store():
    store, timeout = torch.distributed.HashStore(), datetime.timedelta(seconds=20)
    names = []
    for attempt in range(3):
        store.set("name/2", f"of a process that ended in attempt {attempt}")
        with ThreadPoolExecutor() as pool:
            prefixes = set(
                pool.map(lambda rank: distributed.new_prefix(store, rank, 3, timeout), range(3))
            )
        assert len(prefixes) == 1
        names += prefixes
    assert len(set(names)) == 3
    with pytest.raises(ConfigError, match="expected 3 processes, 0 of the other 2 have come"):
        distributed.new_prefix(store, 0, 3, timeout / 100)


def test_processes_with_other_options_do_not_train_together(tiny):
    gather = lambda value: [value, value | {"lr": 0.5, "workers": 7}]  # noqa: E731
    with pytest.raises(ConfigError, match=r"got --lr 0\.02 and 0\.5 in process 0 and 1: start"):
        agreed(tiny(), False, Mock(gather=gather))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_process_that_waits_for_its_partners_ends_at_once(monkeypatch, rank, signum):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", **address}.items():
        monkeypatch.setenv(name, value)
    child = os.fork()
    if not child:
        with StopRequest(), distributed.join("cpu"):
            os._exit(1)
    time.sleep(0.5)
    os.kill(child, signum)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signum


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_becomes_a_request_and_a_later_one_stops_at_once(monkeypatch, signum):
    before = signal.getsignal(signum)
    with StopRequest() as stop:
        assert stop.signum == 0
        for sent in (signum, signal.SIGINT, signal.SIGTERM):  # the first one counts
            signal.raise_signal(sent)
            assert stop.signum == signum
    assert signal.getsignal(signum) is before
    monkeypatch.setattr(distributed, "ECHO_S", -1.0)
    with StopRequest():
        signal.raise_signal(signum)
        with pytest.raises(KeyboardInterrupt):  # the second one stops at once
            signal.raise_signal(signum)


def test_other_threads_install_nothing():
    def enter() -> object:
        with StopRequest():
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor() as threads:
        assert threads.submit(enter).result() is signal.getsignal(signal.SIGINT)


DEFAULT, UNDER_NOHUP = signal.SIG_DFL, signal.SIG_IGN


@pytest.mark.parametrize(
    ("handler", "run_id", "signum"),
    [(DEFAULT, None, 0), (DEFAULT, "1", signal.SIGHUP), (UNDER_NOHUP, "1", 0)],
)
def test_a_hangup_is_outlived_and_under_torchrun_a_request(monkeypatch, handler, run_id, signum):
    before = signal.signal(signal.SIGHUP, handler)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if run_id:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.signum == signum
        assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_torchrun_restarts_a_killed_run_which_goes_on_bit_for_bit(tiny, tmp_path):
    """Replayed steps are those of DistributedDataParallel too."""
    kills = [value for kill in ((0, 4), (1, 9)) for value in ("--kill", *kill, int(signal.SIGKILL))]
    options = {"epochs": 6, "clip_grad": 1.0, "checkpoint_interval_s": 0.0}
    for name, words in {"whole": (), "killed": kills, "replayed": ("--replay", *kills)}.items():
        config = saved(tiny(name=name, **options), tmp_path)
        done = forked("--max-restarts=2", SCRIPT, config, "--resume", "auto", *words)
        assert done.returncode == 0, done.stderr
        starts = json.loads((tmp_path / "runs" / name / "environment.json").read_text())
        assert len(starts) == (3 if words else 1)
        assert ("run as a CUDA graph" in done.stdout) == (name == "replayed")
        assert_same_run(tmp_path / "runs" / name, tmp_path / "runs" / "whole")


@pytest.mark.slow
def test_an_image_that_one_process_misses_stops_all_of_them_after_saving(
    tiny, tmp_path, data, finished
):
    copy, run_dir = tmp_path / "images", tmp_path / "runs" / "run"
    shutil.copytree(data, copy)
    config = saved(tiny(data=str(copy)), tmp_path)
    victim = next((copy / "train" / "red").iterdir())
    content = victim.read_bytes()
    done = forked(SCRIPT, config, "--unlink", victim)
    step = state.read(run_dir / "last.pt").progress.global_step
    assert done.returncode != 0
    errors = re.findall(r"(?m)^error: .*$", done.stderr)
    assert errors
    assert all(f"{victim.name} cannot be read" in error for error in errors)
    assert f"of step {step}: continue with --resume {run_dir}" in done.stderr
    victim.write_bytes(content)
    done = forked(SCRIPT, config, "--resume", run_dir)
    assert done.returncode == 0, done.stderr
    assert_same_run(run_dir, finished)


@pytest.mark.slow
def test_all_processes_skip_the_step_that_is_bad_on_one(tiny, tmp_path):
    config = saved(tiny(skip_bad_steps=1, epochs=1), tmp_path)
    done = forked(SCRIPT, config, "--spoil", 1, 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 2 skipped: its loss or gradient is not finite (1 of 1") == 1
    assert [row["bad_steps"] for row in rows_of(tmp_path / "runs" / "run")] == [1]


def exit_with_eval(*words):
    sys.exit(eval_main(words))


def eval_in(folders, *words):
    """Evaluate with one process in each folder; return how each ended."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    shared |= {"WORLD_SIZE": str(len(folders)), "OMP_NUM_THREADS": "1"}

    def one(rank):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return run_forked(exit_with_eval, *words, folder=folders[rank], **shared, **ranks)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(one, range(len(folders))))


@pytest.mark.slow
def test_weights_that_one_process_misses_are_a_row_and_the_next_are_measured(data, tmp_path):
    """An image that only one process cannot read ends the comparison, and rows so far stay."""
    folders = tmp_path / "0", tmp_path / "1"
    for index, folder in enumerate(folders):
        folder.mkdir()
        torch.manual_seed(index)
        save_checkpoint(smallest(), tmp_path / f"{index}.pth", metadata={"classes": CLASSES})
    shutil.copy(tmp_path / "0.pth", folders[0] / "near.pth")
    both, table = ("0.pth", "1.pth"), tmp_path / "table.csv"
    words = ["--workers", "0", "--batch-size", "2", "--device", "cpu", "--input-size", "12"]
    words += ["--weights", "near.pth", *(str(tmp_path / name) for name in both), "--csv"]
    ends = eval_in(folders, *words, str(table), "--data", str(data))
    assert [end.returncode for end in ends] == [1, 1], ends
    with table.open(newline="") as file:
        near, *rows = csv.DictReader(file)
    assert near["error"].startswith("process 1: CheckpointError: ")
    assert near["top1"] == ""
    for row in rows:
        output = tmp_path / "alone.json"
        one = [*words[:8], "--weights", row["weights"], "--data", str(data), "--overwrite"]
        assert eval_main([*one, "--output", str(output)]) == 0
        alone = json.loads(output.read_text())
        assert (row["error"], int(row["images"])) == ("", alone["images"])
        assert float(row["loss"]) == pytest.approx(alone["loss"], rel=1e-6)
    shutil.copytree(data, tmp_path / "bad")
    bad = sorted((tmp_path / "bad" / "val").glob("*/*"))[0]
    bad.write_bytes(b"no image")
    table.unlink()
    ends = eval_in(folders, *words, str(table), "--data", str(tmp_path / "bad"))
    assert 0 not in (end.returncode for end in ends)
    assert sum(f"{bad.name} cannot be read" in end.stderr for end in ends) == 1
    assert len(table.read_text().splitlines()) == 2


@pytest.mark.slow
def test_torchrun_stopped_from_outside_saves_although_it_signals_the_loaders_too(tiny, tmp_path):
    # torchrun sends its signal to the complete process group of each of its processes
    config = tiny(name="stopped", workers=1, epochs=1000)
    run_dir = tmp_path / "runs" / "stopped"
    command = [*LAUNCHER, "--nproc-per-node=2", SCRIPT, str(saved(config, tmp_path))]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, **streams) as process:
        deadline_s = time.monotonic() + 200
        while not (run_dir / "last.pt").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        before = state.read(run_dir / "last.pt").progress.global_step
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    assert "stopped by SIGTERM after step" in output, output
    assert "DataLoader worker" not in output
    assert state.read(run_dir / "last.pt").progress.global_step >= before
