"""The snapshot of a prediction in PyTorch's own tools."""

import pickle

import pytest
from torch.cuda import _memory_viz

from tresnet.memory import predict
from tresnet.memory.snapshot import snapshot, write_snapshot


@pytest.fixture(scope="module")
def prediction():
    return predict("tresnet_t", batch_size=16, opt="adamw")


def test_pytorchs_viewer_reads_the_snapshot(prediction, tmp_path):
    path = write_snapshot(prediction, tmp_path / "memory.pickle")
    assert b"tresnet.memory" not in path.read_bytes()  # the viewer knows plain types only
    content = pickle.loads(path.read_bytes())
    summary = _memory_viz.segsum(content)  # checks that blocks and segments add up
    assert f"segments: {len(content['segments'])}" in summary
    assert "cudaMalloc" in _memory_viz.trace(content)
    flames = _memory_viz.memory(content, format_flamegraph=lambda text: text)
    line = "stream_0;active_allocated;setup:0:body;setup:0:body.conv1;setup:0:body.conv1.conv;"
    assert line in flames


def test_the_snapshot_agrees_with_the_prediction(prediction):
    content = snapshot(prediction)
    held = sum(segment["allocated_size"] for segment in content["segments"])
    assert held == prediction.end_allocated_bytes
    reserved = most = 0
    for entry in content["device_traces"][0]:
        reserved += entry["size"] if entry["action"] == "segment_alloc" else 0
        reserved -= entry["size"] if entry["action"] == "segment_free" else 0
        most = max(most, reserved)
    assert most == prediction.reserved.expected_bytes
    assert reserved == sum(segment["total_size"] for segment in content["segments"])


def test_the_snapshot_of_too_little_memory_ends_where_it_was_full():
    full = predict("tresnet_t", batch_size=4096, gpu_memory="1GiB")
    assert f"out of memory at {full.out_of_memory}" in str(full)
    *_, last = snapshot(full)["device_traces"][0]
    assert last["action"] == "oom"
    assert last["size"] > last["device_free"]
    assert last["frames"][0]["name"] == full.out_of_memory.name
