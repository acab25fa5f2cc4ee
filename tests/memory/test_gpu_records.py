"""Predictions of today against every record of a GPU's memory that is committed."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from tresnet.cli.memory_matrix import matrix_cases, misses, predict_again
from tresnet.memory import describe_device, predict
from tresnet.memory.convolutions import collect
from tresnet.memory.models import find_model
from tresnet.memory.plan import make_plan
from tresnet.memory.sizes import GIB, MIB

RECORDS = Path(__file__).resolve().parents[2] / "benchmarks" / "records"
# Those of a default run; `-m slow` predicts all.
QUICK = ("tresnet_t", "timm:resnet50")
NONE = "no record of a GPU under benchmarks/records: `tresnet memory compare --matrix` makes one"


def gpu_records(folder: Path) -> list[dict[str, Any]]:
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("memory_matrix_*.json"))]
    return [r for r in records if r["environment"]["device"].get("type") == "cuda"]


def check(folder: Path, models: Collection[str] | None) -> list[str]:
    """What is out of bounds in the records of a folder; skips where there is none."""
    records = gpu_records(folder)
    if not records:
        pytest.skip(NONE)
    if not torch.backends.cuda.is_built():
        pytest.skip("this torch was built without CUDA: its predictions have wider bands")
    rows = [row for record in records for row in predict_again(record, models, folder)]
    assert rows, "the records hold no measurement"
    return misses(rows)


def test_quick_predictions_hold():
    assert check(RECORDS, QUICK) == []


@pytest.mark.slow
def test_all_predictions_hold():
    assert check(RECORDS, None) == []


# -- the check itself, on a record that is made up ----------------------------------------------

GPU = {"type": "cuda", "name": "Fake", "memory_mib": 80 * 1024.0, "compute_capability": "9.0"}
CASES = matrix_cases(["tresnet_t"])[1:3]  # training with AdamW, inference


@pytest.fixture(scope="module")
def truth():
    """What such a GPU would measure if predictions were exact."""
    device = describe_device("Fake", 80 * GIB, (9, 0))
    found = [predict(c.name, device=device, **c.step) for c in CASES]
    return [(p.allocated.mib, p.reserved.mib) for p in found]


def write(folder, measured, gpu=GPU, workspaces=None):
    """A record of the cases, None for one that failed."""
    rows = [
        {
            "name": case.name,
            "model_options": case.model_options,
            "step": case.step,
            "measured": mib and {"allocated_mib": mib[0], "reserved_mib": mib[1]},
        }
        for case, mib in zip(CASES, measured, strict=True)
    ]
    settings = {"workspaces": workspaces}
    record = {"environment": {"device": gpu}, "settings": settings, "rows": rows}
    (folder / "memory_matrix_fake.json").write_text(json.dumps(record))


def test_exact_measurements_pass(truth, tmp_path):
    write(tmp_path, truth)
    assert check(tmp_path, None) == []
    assert check(tmp_path, QUICK) == []


def test_measurements_that_differ_are_found(truth, tmp_path):
    (a, reserved), *others = truth
    write(tmp_path, [(a * 1.06, reserved), *others])
    mean, found = check(tmp_path, None)
    assert "mean error 2.83 %" in mean
    assert "tresnet_t" in found
    assert "allocated off by -5.66 %" in found


def test_the_records_own_gpu_is_predicted_for(truth, tmp_path):
    """Its compute capability decides cuBLAS's workspaces."""
    write(tmp_path, truth, gpu={**GPU, "compute_capability": "8.0"})
    assert len(check(tmp_path, None)) > 1


def test_a_table_of_workspaces_beside_the_record_is_used(truth, tmp_path):
    model = find_model("tresnet_t")[1]
    keys = collect(model, make_plan(model, batch_size=CASES[0].step["batch_size"]))
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"workspaces": dict.fromkeys(keys, 100 * MIB)}))
    write(tmp_path, truth, workspaces="table.json")
    assert any("allocated off by +" in line for line in check(tmp_path, None))
    table.write_text(json.dumps({"workspaces": dict.fromkeys(keys, 0)}))
    assert check(tmp_path, None) == []


def test_cases_that_were_not_measured_do_not_count(truth, tmp_path):
    write(tmp_path, [truth[0], None])
    assert check(tmp_path, None) == []
    write(tmp_path, [None, None])
    with pytest.raises(AssertionError, match="the records hold no measurement"):
        check(tmp_path, None)


def test_without_a_gpus_record_the_check_is_skipped_and_says_so(truth, tmp_path):
    with pytest.raises(pytest.skip.Exception, match="no record of a GPU under benchmarks/records"):
        check(tmp_path, None)
    write(tmp_path, truth, gpu={"type": "cpu"})
    with pytest.raises(pytest.skip.Exception, match="no record of a GPU"):
        check(tmp_path, None)
