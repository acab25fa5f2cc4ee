"""The study's subjects are measured in processes of their own, and predicted as it ran them."""

import json

import pytest
import torch

from benchmarks import memory_study as study
from tests.measure.conftest import about
from tresnet import environment

CPU = torch.device("cpu")


@pytest.mark.parametrize(("name", "expected_mib"), [("variable", 1024.0), ("cnn", 530.9)])
def test_the_clean_measurements_of_the_study_are_predicted(name, expected_mib):
    """What was measured before the study kept other models is exact."""
    if name == "cnn" and not torch.backends.cuda.is_built():
        pytest.skip("predicts on fakes of CPU tensors")
    predicted = study.predicted(name, None)
    assert round(predicted["allocated_mib"], 1) == expected_mib
    assert predicted["reserved_mib"] == study.SUBJECTS[name].reserved_mib


def test_a_subject_is_measured_in_the_phases_of_the_study():
    phases = study.measure("cnn", 2, CPU)["phases"]
    assert list(phases) == ["initial", "model", "train", "final"]
    assert phases["train"]["rss_peak_mib"] > 0


def row(name, **measured):
    contender = study.SubjectContender(name, None, CPU)
    return {**contender.columns, **measured}


def test_errors_are_of_this_gpus_measurement():
    phases = {
        "initial": {"device_used_mib": 500.0},
        "train": {
            "max_allocated_mib": 10000.0,
            "reserved_mib": 12000.0,
            "device_used_mib": 13000.0,
        },
    }
    ours = {"allocated_mib": 10100.0, "reserved_mib": 12100.0}
    text = study.table([row("resnet50", phases=phases, predicted=ours), row("unetr")])
    _, measured, absent = (line.split() for line in text.splitlines())
    assert measured[:2] == ["resnet50", "128"]
    assert measured[2:7] == ["11378.0", "11738.2", "10703.0", "10100.0", "10000.0"]
    assert measured[7:10] == ["+13.8", "+7.0", "+1.0"]
    assert measured[10:] == ["12000.0", "12100.0", "12500.0"]
    assert absent == ["unetr", "8", "5605.0", "5177.9", "3301.0", *"--------"]


def test_a_subject_without_its_package_is_left_out(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(environment, "describe", lambda device: json.loads(json.dumps(about())))
    failed = "Traceback\ntresnet.errors.MissingDependencyError: UNETR needs MONAI and einops"
    done = study.subprocess.CompletedProcess([], 1, "", failed)
    monkeypatch.setattr(study.subprocess, "run", lambda *args, **options: done)
    assert study.main(["unetr", "--rehearse", "--output-dir", str(tmp_path)]) == 0
    assert "left_out: exit code 1: tresnet.errors.MissingDependencyError" in capsys.readouterr().out
    (path,) = tmp_path.glob("memory_study_*.json")
    (saved,) = json.loads(path.read_text())["rows"]
    assert saved["status"] == "left_out"
