"""A run that SIGKILL hits again and again, at random moments, ends as one that it never hit.

TRESNET_KILLS=200 pytest -m slow tests/engine/test_kills.py kills it more often.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.runs import assert_same_run
from tresnet.engine import config as configs

KILLS = int(os.environ.get("TRESNET_KILLS", "20"))
# Imports once, computes nothing, and forks a process for each start of the run.
SCRIPT = """
import json, os, random, sys, time, traceback
from pathlib import Path
import torch, timm.loss, timm.optim, timm.utils, torchvision.transforms, torch._dynamo
from tresnet.engine import config as configs
from tresnet.engine.train import train

torch.set_num_threads(1)
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
        runs = Path(config.run.runs)
        (runs / "killed").rename(runs / f"ended {time.monotonic_ns()}")
assert os.waitpid(start("killed"), 0)[1] == 0
print(json.dumps({"killed": killed, "within a write": cut}))
"""


@pytest.mark.slow
@pytest.mark.timeout(180 + 20 * KILLS)
def test_kills_at_random_moments_change_nothing(tiny, tmp_path):
    config = tiny(epochs=3, checkpoint_interval_s=0.0)
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
