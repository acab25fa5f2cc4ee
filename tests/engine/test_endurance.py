"""Long runs: one that is killed again and again ends as one that never was; none leaks.

TRESNET_KILLS=200 TRESNET_SOAK=20000 pytest -m slow -s tests/engine/test_endurance.py goes on.
"""

import gc
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.engine.runs import assert_same_run, rows_of
from tresnet.engine import config as configs
from tresnet.engine.train import train
from tresnet.steps import TrainingStep

KILLS = int(os.environ.get("TRESNET_KILLS", "20"))
UPDATES = int(os.environ.get("TRESNET_SOAK", "400"))
SETTLED, EVERY = 100, 20
# Imports once, computes nothing, and forks a process for each start of the run.
SCRIPT = """
import json, os, random, sys, time, traceback
from pathlib import Path
import torch, timm.loss, timm.optim, timm.utils, torchvision.transforms, torch._dynamo
from tresnet.engine import config as configs
from tresnet.engine.train import train

torch.set_num_threads(1)
sys.modules["matplotlib"] = None  # drawing a picture takes longer than such a run
config, kills, moment = configs.load(Path(sys.argv[1])), int(sys.argv[2]), random.Random(0)

def start(name):
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        train(configs.replace(config, name=name), Path("auto"))
        code = 0
    finally:
        traceback.print_exc() if code else None
        os._exit(code)

begin = time.monotonic()
assert os.waitpid(start("finished"), 0)[1] == 0
whole_s, killed, cut = time.monotonic() - begin, 0, 0
while killed < kills:
    child = start("killed")
    time.sleep(moment.uniform(0, whole_s))
    os.kill(child, 9)
    status = os.waitpid(child, 0)[1]
    killed += status == 9
    assert status in (0, 9), status
    cut += len(list(Path(config.run.runs, "killed").glob("*.tmp")))
    if status == 0 and killed < kills:  # it came to its end: begin another
        whole_s *= 0.9  # the first run imported more, so it took longer
        runs = Path(config.run.runs)
        (runs / "killed").rename(runs / f"ended {time.monotonic_ns()}")
assert os.waitpid(start("killed"), 0)[1] == 0
print(json.dumps({"killed": killed, "within a write": cut}))
"""


@pytest.mark.slow
@pytest.mark.timeout(180 + 20 * KILLS)
def test_kills_at_random_moments_change_nothing(tiny, tmp_path):
    config = tiny(epochs=2, checkpoint_interval_s=0.0)
    (tmp_path / "config.json").write_text(configs.to_json(config))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "config.json"), str(KILLS)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["killed"] == KILLS
    assert counts["within a write"] > 0
    runs = [path for path in (tmp_path / "runs").iterdir() if path.name != "finished"]
    for run_dir in runs:
        assert_same_run(run_dir, tmp_path / "runs" / "finished")
    sys.stdout.write(f"{counts}, {len(runs)} runs\n")


def held():
    """Return the resident bytes and the counts of files, processes and shared memory held."""
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
            gc.collect()
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
