"""Predictions against the committed records of measured GPU memory."""

import copy
import functools
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import memory_accuracy as accuracy
from tests.toys import sgd
from tresnet.memory import describe_device, predict
from tresnet.memory.capacity import MaxBatch
from tresnet.memory.device import GENERIC, GIB, MIB
from tresnet.memory.replay import replay
from tresnet.memory.trace import Buffer, Category, Event, Phase, Trace

RECORDS = Path(__file__).resolve().parents[2] / "benchmarks" / "records"
NOTEBOOK = RECORDS / "memory_notebook_torch2.15.0_2026-11-23.json"
GPU = {"type": "cuda", "name": "Fake", "memory_mib": 80 * 1024.0, "compute_capability": "9.0"}


def small_cnn():
    head = nn.Linear(8 * 111 * 111, 10)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.AvgPool2d(2), nn.Flatten(), head)


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="predicts on fakes of CPU tensors")
@pytest.mark.parametrize("name", ["cnn", "vgg16", "resnet50", "vit_b_16"])
def test_a_notebooks_measurements_are_predicted(name):
    model = {"cnn": small_cnn, "vgg16": "torchvision:vgg16_bn"}.get(name, f"torchvision:{name}")
    step = {"batch_size": 128, "target_size": (10,), "opt": sgd}
    step |= {"amp": "off", "channels_last": False}
    p = predict(model, **step, **({"num_classes": 10} if isinstance(model, str) else {}))
    rows = json.loads(NOTEBOOK.read_text())["rows"]
    measured = next(row for row in rows if row["model"] == name)
    if name == "vgg16":  # cuDNN's workspaces are within the range
        high_mib = p.allocated.high_bytes / MIB
        assert p.allocated.mib < measured["measured_alone_mib"] < high_mib < 1.08 * p.allocated.mib
    else:
        assert p.allocated.mib == pytest.approx(measured["measured_alone_mib"], rel=0.006)
    if name == "cnn":
        assert round(p.allocated.mib, 1) == measured["measured_alone_mib"]
        assert p.reserved.mib == measured["measured_reserved_mib"]


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="predicts on fakes of CPU tensors")
def test_measurements_of_gpus_are_predicted():
    records = [json.loads(path.read_text()) for path in RECORDS.glob("memory_matrix_*.json")]
    rows = [row for one in records for row in accuracy.predict_again(one) if not folds(row)]
    assert {row["step"]["opt"] for row in rows} == {"sgd", "adamw"}
    assert {row["step"]["amp"] for row in rows} == {"off", "bf16"}
    assert accuracy.misses(rows) == []
    # seen: 0.27 % too low at most
    assert max(abs(row["allocated_error_percent"]) for row in rows) < 1


def folds(row):
    """Return whether norms were folded with the batch on the GPU, as records up to 02e7d1d3 did."""
    return not row["step"].get("train", True)


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="predicts on fakes of CPU tensors")
def test_the_peak_of_inference_is_that_of_folding_beside_the_batch():
    """No workspace is missing: with the batch in memory first, the prediction is 0.35 % high."""
    made = json.loads((RECORDS / "memory_matrix_h200_torch2.11.0_2026-11-26.json").read_text())
    (row,) = filter(folds, made["rows"])
    batch_size = made["settings"]["batch_size"]
    trace = predict(row["model"], device="h200", batch_size=batch_size, **row["step"]).trace
    sizes = 4 * batch_size * 3 * 224 * 224, 8 * batch_size  # images and labels
    first = [Buffer(n_bytes, Category.INPUT, "", 0) for n_bytes in sizes]
    events = [Event(len(trace.buffers) + i, True, 0) for i in range(len(first))]
    held = replay(Trace(trace.buffers + first, trace.operations, events + trace.events))
    assert trace.operations[(events + trace.events)[held.peak_event].op].phase is Phase.SETUP
    measured = row["measured"]["allocated_mib"]
    assert held.peak_allocated_bytes / MIB == pytest.approx(measured, rel=0.005)


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="predicts on fakes of CPU tensors")
def test_the_peak_of_eager_inference_is_predicted():
    """cuBLAS held five workspaces more than inference needs: four of two graphs, in forward and
    backward, that the process had trained with, and that of the default stream's backward."""
    made = json.loads((RECORDS / "bench_infer_h200_torch2.11.0_2026-11-26.json").read_text())
    (row,) = (
        row
        for row in made["rows"]
        if (row["model"], row["batch_size"], row["replayed"]) == ("tresnet_m", 256, False)
    )
    p = predict("tresnet_m", batch_size=256, device="h200", dtype="bf16", amp="off", train=False)
    steps = [
        n_bytes
        for event, n_bytes in zip(p.trace.events, p.replay.allocated_bytes, strict=True)
        if p.trace.operations[event.op].phase is not Phase.SETUP  # measured after folding
    ]
    assert max(steps) / MIB == pytest.approx(row["max_allocated_mib"] - 5 * 32, rel=0.005)


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="predicts on fakes of CPU tensors")
def test_peaks_of_training_steps_on_gpus_are_predicted():
    rows = [*accuracy.predict_benchmarks(RECORDS)]
    assert {row["model"] for row in rows} > {"tresnet_m", "timm:tresnet_m", "timm:tresnet_xl"}
    for row in rows:
        predicted, measured = row["predicted"], row["measured"]
        # seen: 0.22 % too low to 0.19 % too high; the range of a prediction begins 1 % below it
        allocated_mib = pytest.approx(measured["allocated_mib"], rel=0.005)
        assert predicted["allocated_mib"] == allocated_mib, row["model"]
        # seen: within 2.1 % on the H100; 9.2 % too low to 3.0 % too high on the H200
        near = 0.03 if "H100" in row["gpu"] else 0.1
        reserved_mib = pytest.approx(measured["reserved_mib"], rel=near)
        assert predicted["reserved_mib"] == reserved_mib, row["model"]


def record(rows, factor=1.0, capability="9.0"):
    """Return a record of a GPU with exact predictions, whose first row is scaled by a factor."""
    rows = copy.deepcopy(rows)
    for row in rows:
        row["measured"] = {n: mib * factor for n, mib in row["predicted"].items()}
        factor = 1.0
    return {
        "environment": {"device": {**GPU, "compute_capability": capability}},
        "rows": [*rows, {**rows[0], "measured": None}],
    }


def test_exact_measurements_pass_and_others_are_found(monkeypatch):
    monkeypatch.setattr(accuracy, "predict", functools.cache(accuracy.predict))
    device = describe_device("Fake", 80 * GIB, (9, 0))
    rows = [accuracy.predicted(row, device) for row in accuracy.matrix(["tresnet_t"])[3:5]]
    # the other row, which is exact, is no miss
    mean, row = accuracy.misses(accuracy.predict_again(record(rows, 1.06)))
    assert "mean error 2.83 %" in mean
    assert "allocated off by -5.66 %" in row
    # the record's own GPU decides cuBLAS's workspaces
    other = accuracy.predict_again(record(rows, capability="8.0"))
    assert len(accuracy.misses(other)) > 1


def test_eager_steps_are_measured_in_the_same_precision():
    row, cases = {"model": "tresnet_t", "step": {"amp": "bf16", "train": False}}, []
    error = {"error": "no GPU"}
    result = accuracy.measured(row, lambda *arguments: cases.append(arguments) or error)
    assert result == {**row, "measured": None, **error}
    ((case, training),) = cases
    compute = case.step.compute
    assert (compute.cuda_graph, compute.amp, training) == ("off", "bf16", False)


FULL = {"error": "exit code 1: torch.OutOfMemoryError: CUDA out of memory"}
CRASHED = {"error": "exit code -11: no message"}


@pytest.mark.parametrize(
    ("limit", "no_from", "expected"),
    [
        (105, 110, [(100, "yes", True, True), (110, "no", False, True)]),
        (120, 110, [(100, "yes", True, True), (110, "no", True, False)]),  # it fitted after all
        (99, 110, [(100, "yes", False, False), (110, "no", False, True)]),
        (105, 130, [(100, "yes", True, True), (110, "uncertain", False, True)]),
    ],
)
def test_two_batches_are_tried(limit, no_from, expected):
    def run(batch_size):
        return {"phases": {}} if batch_size <= limit else FULL

    rows = accuracy.try_out(MaxBatch(100, no_from, GENERIC), run)
    assert [(r["batch_size"], r["answer"], r["ran"], r["holds"]) for r in rows] == expected
    crashed = accuracy.try_out(MaxBatch(100, 110, GENERIC), lambda batch_size: CRASHED)
    assert [row["holds"] for row in crashed] == [False, False]
