"""`tresnet memory max-batch --verify`, with runs that are made up."""

import json

import pytest

from tresnet.cli.memory_max_batch import MemoryMaxBatch, try_out
from tresnet.errors import InputError
from tresnet.memory.device import GENERIC
from tresnet.memory.fit import MaxBatch

FULL = {"error": "exit code 1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"}
CRASHED = {"error": "exit code -11: no message"}


def gpu_of(limit):
    """Runs of batches up to a limit end, others find the memory full."""

    def run(batch_size):
        memory = {"max_allocated_mib": 10.0, "reserved_mib": 20.0, "device_used_mib": 30.0}
        return {"phases": {"train": memory}} if batch_size <= limit else FULL

    return run


def found(batch_size, no_from):
    return MaxBatch(batch_size, no_from, GENERIC, traced=4)


@pytest.mark.parametrize(
    ("limit", "no_from", "expected"),
    [
        (105, 110, [(100, "yes", True, True), (110, "no", False, True)]),
        (120, 110, [(100, "yes", True, True), (110, "no", True, False)]),  # it fitted after all
        (99, 110, [(100, "yes", False, False), (110, "no", False, True)]),
        (105, 130, [(100, "yes", True, True), (110, "uncertain", False, True)]),
        (115, 130, [(100, "yes", True, True), (110, "uncertain", True, True)]),
    ],
)
def test_two_batches_are_tried(limit, no_from, expected):
    rows = try_out(found(100, no_from), gpu_of(limit))
    assert [(r["batch_size"], r["answer"], r["ran"], r["holds"]) for r in rows] == expected


def test_small_batches_have_a_next_one_too():
    assert [r["batch_size"] for r in try_out(found(3, 5), gpu_of(3))] == [3, 4]
    assert [r["batch_size"] for r in try_out(found(0, 1), gpu_of(0))] == [1]


def test_a_crash_is_no_proof(capsys):
    rows = try_out(found(100, 110), lambda batch_size: CRASHED)
    assert [row["holds"] for row in rows] == [False, False]
    assert "error: batch 110: exit code -11" in capsys.readouterr().err


def test_verifying_needs_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match="expected a GPU for --device cuda, found none"):
        MemoryMaxBatch(model="tresnet_t", verify=True, gpu_memory="1GiB").run([])


def test_verifying_writes_a_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tresnet.cli.memory_max_batch.require_gpu", lambda device: None)
    monkeypatch.setattr("tresnet.memory.max_batch", lambda *args, **kwargs: found(8, 9))
    monkeypatch.setattr(
        "tresnet.cli.memory_max_batch.measure_in_new_process",
        lambda case, timeout_s: gpu_of(8)(case.step["batch_size"]),
    )
    device = {"type": "cuda", "name": "Fake"}
    monkeypatch.setattr("tresnet.env.describe", lambda device_: {"device": device})
    command = MemoryMaxBatch(model="tresnet_t", verify=True, amp="bf16", output_dir=tmp_path)
    assert command.run(["memory", "max-batch", "tresnet_t", "--verify"]) == 0
    (path,) = tmp_path.glob("memory_max_batch_fake_*.json")
    record = json.loads(path.read_text())
    assert [row["holds"] for row in record["rows"]] == [True, True]
    assert record["settings"]["amp"] == "bf16"
    assert record["settings"]["no_from"] == 9
    assert "yes" in capsys.readouterr().out
