"""A long run holds as much memory, and as many files and processes, as a short one.

TRESNET_SOAK=20000 pytest -m slow tests/engine/test_soak.py -s makes more updates than 400.
"""

import gc
import multiprocessing
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.engine.runs import rows_of
from tresnet.engine.train import train
from tresnet.steps import TrainingStep

UPDATES = int(os.environ.get("TRESNET_SOAK", "400"))
SETTLED, EVERY = 100, 20


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
