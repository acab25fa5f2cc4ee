"""Memory of each phase, in this process and in one of its own."""

import pytest
import torch

from tresnet.measure import phases
from tresnet.measure.cases import BenchCase
from tresnet.measure.phases import measure_in_new_process, measure_phases
from tresnet.settings.fields import replace

CASE = replace(BenchCase("timm:test_resnet", 2), input_size=32)
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


def test_a_process_ends_in_phases_or_in_a_reason():
    late = {"error": "not finished after 0 s"}
    assert measure_in_new_process(CASE, True, "cpu", 0.01) == late
    unknown = measure_in_new_process(replace(CASE, model="tresnet_q"), True, "cpu", 60)["error"]
    assert unknown.startswith("exit code 1: unknown model 'tresnet_q'")
    found = measure_in_new_process(CASE, True, "cpu", 60)["phases"]
    assert found["train"]["rss_peak_mib"] > 0
