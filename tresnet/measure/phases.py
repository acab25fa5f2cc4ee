"""Measurement of a model's memory in each phase of a run, in a new process."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tresnet import devices
from tresnet.errors import TResNetError
from tresnet.measure.cases import BenchCase
from tresnet.measure.contenders import prepare
from tresnet.measure.memory_meter import MemoryMeter
from tresnet.measure.records import RecordFile
from tresnet.measure.runner import Contender, NoResultError, Outcome, run
from tresnet.measure.settings import RunSettings
from tresnet.settings.fields import flatten, replace
from tresnet.steps.graph import WARMUP_RUNS

# Eager steps reach their peak in the second step; the last of the STEPS steps captures a graph.
STEPS = WARMUP_RUNS + 1


def measure_phases(
    case: BenchCase, training: bool, device: str, steps: int = STEPS
) -> dict[str, dict[str, float | None]]:
    """Return the memory in MiB by phase and column; an invalid `case` raises InputError."""
    where = devices.timed_device(device)
    checked = case.checked(training, devices.capability(where))
    meter = MemoryMeter(where)
    meter.phase("initial")
    step, *others = prepare(checked, training, where)
    meter.phase("model")
    for _ in range(steps):
        step()
    meter.phase("train")
    del step, others
    meter.phase("final")
    return {name: snapshot.to_dict() for name, snapshot in meter.phases.items()}


def measure_memory(
    training: bool,
    cases: Sequence[BenchCase],
    settings: RunSettings,
    log: Callable[[str], object],
) -> Outcome:
    """Check all cases (models with settings); run each in a new process and record its memory."""
    settings.check()
    device = devices.timed_device(settings.device)
    checked = [case.checked(training, devices.capability(device)) for case in cases]
    about = {"settings": {"training": training}, "runs": STEPS}
    record = RecordFile(settings.output_dir, "memory", device=device, **about)
    group = [_PhaseContender(case, training, str(device)) for case in checked]
    return run([group], settings, log=log, record=record)


class _PhaseContender(Contender):
    def __init__(self, case: BenchCase, training: bool, device: str) -> None:
        self.label, self._arguments = case.label(training), (case, training, device)
        self.columns = {**case.columns(), "phases": None}

    def set_up(self) -> None:
        result = measure_in_new_process(*self._arguments, timeout_s=None)
        if "error" in result:
            raise NoResultError("failed", result["error"])
        self.columns |= result


def measure_in_new_process(
    case: BenchCase, training: bool, device: str, timeout_s: float | None
) -> dict[str, Any]:
    """Measure a case in a new process; return a dict with `phases`, or with `error` if it fails."""
    task = {"case": flatten(case), "training": training, "device": device}
    command = [sys.executable, "-m", "tresnet.measure.phases", json.dumps(task)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not finished after {timeout_s:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return {"phases": json.loads(lines[-1])}
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return {"error": f"exit code {done.returncode}: {last}"}


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    try:
        phases = measure_phases(replace(BenchCase(), **task.pop("case")), **task)
    except TResNetError as error:
        sys.exit(str(error))
    sys.stdout.write(json.dumps(phases) + "\n")
