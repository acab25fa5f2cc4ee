"""Long runs: one that is killed again and again ends as one that never was; none leaks.

TRESNET_KILLS=200 TRESNET_SOAK=20000 pytest -m slow -s tests/engine/test_endurance.py goes on.
"""

import gc
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from tests.engine.runs import assert_same_run, rows_of
from tests.forks import SERVER
from tresnet.engine import config as configs
from tresnet.engine.train import train
from tresnet.steps import TrainingStep

KILLS = int(os.environ.get("TRESNET_KILLS", "20"))
UPDATES = int(os.environ.get("TRESNET_SOAK", "400"))
SETTLED, EVERY = 100, 20


def start(config):
    """Begin a run or go on with it, in a process of its own."""
    child = SERVER.Process(target=_train, args=(config,))
    child.start()
    return child


def _train(config):
    torch.set_num_threads(1)
    sys.modules["matplotlib"] = None  # drawing a picture takes longer than such a run
    train(config, Path("auto"))


def exit_code(child):
    child.join()
    return child.exitcode


@pytest.mark.slow
@pytest.mark.timeout(180 + 20 * KILLS)
def test_kills_at_random_moments_change_nothing(tiny, tmp_path):
    config, runs, moment = tiny(epochs=2, checkpoint_interval_s=0.0), tmp_path / "runs", Random(0)
    for name in ("finished", "timed"):  # the first one waits until the server has imported torch
        begin = time.monotonic()
        assert exit_code(start(configs.replace(config, name=name))) == 0
    whole_s, killed, within_a_write = time.monotonic() - begin, 0, 0
    while killed < KILLS or not within_a_write:
        child = start(config)
        child.join(moment.uniform(0, whole_s))
        child.kill()
        code = exit_code(child)
        assert code in (0, -signal.SIGKILL)
        killed += code != 0
        within_a_write += len(list((runs / "run").glob("*.tmp")))
        if code == 0:  # it came to its end: begin another
            whole_s *= 0.9
            (runs / "run").rename(runs / f"ended {time.monotonic_ns()}")
    assert exit_code(start(config)) == 0
    others = [path for path in runs.iterdir() if path.name != "finished"]
    for run_dir in others:
        assert_same_run(run_dir, runs / "finished")
    sys.stdout.write(f"{killed} kills, {within_a_write} within a write, {len(others)} runs\n")


def held():
    """Return the resident bytes and the counts of files, processes and shared memory held."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    shared = [name for name in os.listdir("/dev/shm") if any(f"_{pid}_" in name for pid in pids)]
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), len(pids), shared


@pytest.mark.slow
@pytest.mark.timeout(60 + UPDATES)
def test_a_long_run_holds_no_more_than_a_short_one(tiny, monkeypatch):
    """Include evaluation and checkpoints: 6 optimizer steps an epoch, a loader process a split."""
    before, samples, update = held(), [], TrainingStep.optimizer_step

    def updating(self, number):
        update(self, number)
        if number >= SETTLED and number % EVERY == 0:
            samples.append((number, *held()))

    monkeypatch.setattr(TrainingStep, "optimizer_step", updating)
    result = train(tiny(epochs=UPDATES // 6, workers=1, eval_interval=2, skip_bad_steps=1))
    assert len(rows_of(result.run_dir)) == UPDATES // 6
    numbers, resident, *rest = zip(*samples, strict=True)
    per_1000_updates = 1000 * np.polyfit(numbers, resident, 1)[0]
    sys.stdout.write(
        f"{per_1000_updates / 1e6:+.3f} MB per 1000 updates from {resident[0] / 1e6:.1f} MB, over"
        f" {UPDATES - SETTLED}; files, processes, shared memory: {[r[-1] for r in rest]}\n"
    )
    assert per_1000_updates < 1e6
    for counts in rest:
        assert counts[-1] == counts[0]
    assert held()[1:] == before[1:]
