"""Memory of each phase, in this process and in one of its own."""

import json
import subprocess
from types import SimpleNamespace

import pytest
import torch

from tresnet.measure import phases
from tresnet.measure.cases import BenchCase
from tresnet.measure.phases import measure_in_new_process, measure_memory, measure_phases
from tresnet.measure.settings import RunSettings
from tresnet.settings.fields import replace

CASE = replace(BenchCase("timm:test_resnet", 2), input_size=32)
COLUMNS = {"initial": {"rss_peak_mib": 1.0}}
pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("training", [True, False])
def test_every_phase_is_measured_around_some_steps(training, monkeypatch):
    steps = []
    prepare = phases.prepare

    def counted(*arguments):
        run, *others = prepare(*arguments)
        return (lambda: steps.append(torch.is_grad_enabled()) or run(), *others)

    monkeypatch.setattr(phases, "prepare", counted)
    measured = measure_phases(CASE, training, "cpu", steps=3)
    assert list(measured) == ["initial", "model", "train", "final"]
    assert all(columns["rss_peak_mib"] > 0 for columns in measured.values())
    assert len(steps) == 3


@pytest.mark.parametrize(
    ("code", "out", "err", "result"),
    [
        (0, f"a warning\n{json.dumps(COLUMNS)}\n", "", {"phases": COLUMNS}),
        (0, "", "", {"error": "exit code 0: no message"}),
        (2, json.dumps(COLUMNS), "first\nlast\n", {"error": "exit code 2: last"}),
        (None, "", "", {"error": "not finished after 7 s"}),
    ],
)
def test_a_process_ends_in_phases_or_in_a_reason(code, out, err, result, monkeypatch, tmp_path):
    def run(command, **options):
        assert options == {"capture_output": True, "text": True, "check": False, "timeout": 7}
        task = json.loads(command[-1])
        assert (task["case"]["model"], task["training"]) == ("timm:test_resnet", True)
        if code is None:
            raise subprocess.TimeoutExpired(command, 7)
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    monkeypatch.setattr(phases.subprocess, "run", run)
    assert measure_in_new_process(CASE, True, "cpu", 7) == result
    monkeypatch.setattr(phases, "measure_in_new_process", lambda *a, timeout_s: result)
    outcome = measure_memory(True, [CASE], RunSettings(output_dir=tmp_path), str)
    row = json.loads(outcome.path.read_text())["rows"][0]
    assert (row["phases"], row["error"]) == (result.get("phases"), result.get("error"))
