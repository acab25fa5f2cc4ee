"""The timeline of a prediction, its picture, and its snapshot in PyTorch's own tools."""

import itertools
import pickle

import pytest
from torch.cuda import _memory_viz

from tresnet.memory import Category, Phase, predict
from tresnet.memory.plot import COLORS, _draw, plot, timeline
from tresnet.memory.snapshot import snapshot, write_snapshot


@pytest.fixture(scope="module")
def prediction():
    return predict("tresnet_t", batch_size=16, opt="adamw")


def test_points_add_up_and_reach_the_peak(prediction):
    points = timeline(prediction)
    assert max(p.allocated_bytes for p in points) == prediction.allocated.expected_bytes
    for point in points:
        assert sum(point.by_category_bytes.values()) == point.allocated_bytes
        assert min(point.by_category_bytes.values()) >= 0
        assert point.allocated_bytes <= point.reserved_bytes
    phases = [phase for phase, _ in itertools.groupby(p.operation.phase for p in points)]
    of_steps = [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
    assert [phase for phase in phases if phase in of_steps] == of_steps, phases


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_picture_is_drawn(prediction, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    assert set(COLORS) == set(Category)
    content = plot(prediction, tmp_path / f"memory{suffix}").read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    assert len(content) > 10_000


def test_phases_and_the_peak_are_named_where_they_are(prediction):
    figure, points = pytest.importorskip("matplotlib.figure").Figure(), timeline(prediction)
    axes = figure.subplots()
    _draw(axes, prediction)
    *phases, peak = axes.texts
    named = [points[int(text.get_position()[0])].operation.phase for text in phases]
    assert [text.get_text() for text in phases] == named == ["forward", "backward"]
    index, mib = peak.xy
    assert mib * 2**20 == points[index].allocated_bytes == max(p.allocated_bytes for p in points)


def test_pytorchs_viewer_reads_the_snapshot(prediction, tmp_path):
    path = write_snapshot(prediction, tmp_path / "memory.pickle")
    content = pickle.loads(path.read_bytes())
    summary = _memory_viz.segsum(content)  # checks that blocks and segments add up
    assert f"segments: {len(content['segments'])}" in summary
    assert "cudaMalloc" in _memory_viz.trace(content)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(content)
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
