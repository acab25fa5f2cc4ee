"""The timeline, its picture and its page."""

import itertools
import json
import re
import sys

import pytest

from tresnet.errors import InputError, MissingDependencyError
from tresnet.memory import Category, Phase, predict
from tresnet.memory.page import page_data, write_page
from tresnet.memory.palette import COLORS
from tresnet.memory.plot import plot
from tresnet.memory.timeline import STACK, module_rows, phases, timeline


@pytest.fixture(scope="module")
def prediction():
    return predict("tresnet_t", batch_size=16, optimizer="adamw")


def test_points_add_up_and_reach_the_peak(prediction):
    points = timeline(prediction)
    assert max(p.allocated_bytes for p in points) == prediction.allocated.expected_bytes
    for point in points:
        assert sum(point.by_category_bytes) == point.allocated_bytes
        assert min(point.by_category_bytes) >= 0
        assert point.allocated_bytes <= point.reserved_bytes
    assert {p.operation.step for p in points} <= {1, 2}


def test_phases_follow_each_other(prediction):
    points = timeline(prediction)
    spans = phases(points)
    order = [s.phase for s in spans if s.phase in (Phase.FORWARD, Phase.BACKWARD)]
    assert order == [Phase.FORWARD, Phase.BACKWARD]
    assert spans[0].first == 0
    assert spans[-1].last == len(points) - 1
    assert all(a.last + 1 == b.first for a, b in itertools.pairwise(spans))


def test_modules_hold_the_activations_of_the_peak(prediction):
    rows = module_rows(prediction)
    total = sum(r.activation_bytes for r in rows)
    assert total == pytest.approx(prediction.by_category[Category.ACTIVATIONS], rel=0.05)
    assert "body.layer1.0.conv1.conv" in {r.name for r in rows}


def test_every_category_has_a_colour_of_its_own():
    assert set(COLORS) == set(STACK)
    assert len(set(COLORS.values())) == len(STACK)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_picture_is_drawn(prediction, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = plot(prediction, tmp_path / f"memory{suffix}")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    assert len(content) > 10_000


def test_picture_needs_matplotlib(prediction, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'tresnet\[plot\]'"):
        plot(prediction, tmp_path / "memory.png")


@pytest.mark.parametrize("draw", [plot, write_page], ids=["plot", "page"])
def test_bad_paths_are_explained(prediction, tmp_path, draw):
    with pytest.raises(InputError, match="expected a path ending in"):
        draw(prediction, tmp_path / "memory.doc")
    suffix = ".png" if draw is plot else ".html"
    with pytest.raises(InputError, match="expected an existing folder"):
        draw(prediction, tmp_path / "none" / f"memory{suffix}")


def test_page_is_self_contained(prediction, tmp_path):
    text = write_page(prediction, tmp_path / "memory.html").read_text("utf-8")
    assert re.findall(r"(?:src|href|@import|url\()", text) == []
    links = set(re.findall(r"https?://[^\s\"']+", text))
    assert links == {"http://www.w3.org/2000/svg"}  # the name of SVG, never fetched
    assert "<title>GPU memory of tresnet_t</title>" in text


def test_page_carries_its_data(prediction, tmp_path):
    text = write_page(prediction, tmp_path / "memory.html").read_text("utf-8")
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text)
    assert json.loads(found[1]) == page_data(prediction)


def test_names_cannot_end_the_data_early(prediction, tmp_path):
    import dataclasses

    odd = dataclasses.replace(prediction, model="</script><b>x")
    text = write_page(odd, tmp_path / "memory.html").read_text("utf-8")
    assert "</script><b>" not in text


def test_places_are_checked_before_a_prediction_is_made(tmp_path, monkeypatch):
    from tresnet.cli.memory import MemoryPredict

    def no_work(*args, **kwargs):
        raise AssertionError("predicted before the path was checked")

    monkeypatch.setattr("tresnet.memory.predict", no_work)
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(InputError, match="expected a file to write, got the folder"):
        MemoryPredict(page=tmp_path / "folder.html").run([])
    with pytest.raises(InputError, match=r"expected a path ending in .png"):
        MemoryPredict(plot=tmp_path / "memory.doc").run([])
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(InputError, match="expected a folder that can be written to"):
        MemoryPredict(page=tmp_path / "memory.html").run([])


@pytest.mark.parametrize("draw", [plot, write_page], ids=["plot", "page"])
def test_a_failed_picture_leaves_the_old_one(prediction, tmp_path, draw, monkeypatch):
    if draw is plot:
        pytest.importorskip("matplotlib")
    path = tmp_path / ("memory.png" if draw is plot else "memory.html")
    path.write_text("old")

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(InputError, match=r"cannot write .*No space left"):
        draw(prediction, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
