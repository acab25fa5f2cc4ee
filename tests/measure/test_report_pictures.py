import sys

import pytest

from tests.measure.record_files import CPU, put, step_row
from tresnet.errors import MissingDependencyError
from tresnet.measure.read_records import read_records
from tresnet.measure.report import sections
from tresnet.measure.report_pictures import draw_pictures, memory_lines, speed_points

ROWS = [
    step_row("tresnet_m", 100.0, batch_size=64, max_allocated_mib=500.0),
    step_row("tresnet_m", 120.0, batch_size=128, max_allocated_mib=900.0),
    step_row("timm:resnet50", 70.0),
    step_row("torchvision:resnet50", 80.0),
    step_row("timm:tresnet_m", None),
]


def section_of(folder):
    (section,) = sections(read_records(folder))
    return section


def test_points_are_best_speeds_at_published_accuracies(tmp_path):
    put(tmp_path, "train", "bench_train", ROWS)
    section = section_of(tmp_path)
    found = {
        (one.weights, one.images_per_s, one.top1) for one in speed_points(section, "bench_train")
    }
    assert found == {
        ("tresnet_m.miil_in1k", 120.0, 80.816),
        ("tresnet_m.miil_in21k_ft_in1k", 120.0, 83.09),
        ("resnet50.IMAGENET1K_V2", 80.0, 80.858),
    }
    assert speed_points(section, "bench_infer") == []


def test_the_newest_record_of_a_contender_counts(tmp_path):
    for name, speed, day in (("old", 200.0, "01"), ("new", 100.0, "02")):
        date = f"2026-01-{day}T00:00:00+00:00"
        put(tmp_path, name, "bench_train", [step_row("tresnet_l", speed)], date=date)
    (point,) = speed_points(section_of(tmp_path), "bench_train")
    assert (point.images_per_s, point.record) == (100.0, "new.json")


def test_a_later_record_of_a_single_setting_is_not_a_contenders_best(tmp_path):
    """benchmarks/gpu.sh measures memory, eagerly, after the comparison of all settings."""
    compiled = step_row("timm:tresnet_m", 150.0, compile="default")
    put(tmp_path, "all", "bench_train", [compiled, step_row("timm:tresnet_m", 100.0)])
    rows = [step_row("timm:tresnet_m", speed, batch_size=int(speed)) for speed in (98.0, 99.0)]
    put(tmp_path, "memory", "bench_train", rows, date="2026-02-01T00:00:00+00:00")
    (point, *_) = speed_points(section_of(tmp_path), "bench_train")
    assert (point.images_per_s, point.record) == (150.0, "all.json")


def test_memory_over_batches_is_of_one_record(tmp_path):
    put(tmp_path, "a", "bench_train", ROWS)
    one = step_row("tresnet_m", 90.0, batch_size=256, max_allocated_mib=5000.0)
    put(tmp_path, "b", "bench_train", [one], date="2026-02-01T00:00:00+00:00")
    lines = {line.label.partition(",")[0]: line for line in memory_lines(section_of(tmp_path))}
    assert lines.keys() == {"tresnet_m", "timm:resnet50", "torchvision:resnet50"}
    ours = lines["tresnet_m"]
    assert (ours.batches, ours.peaks_mib, ours.record) == ((64, 128), (500.0, 900.0), "a.json")


def test_pictures_are_drawn_and_marked(tmp_path):
    pytest.importorskip("matplotlib")
    put(tmp_path, "train", "bench_train", ROWS, device=CPU)
    speed, memory = draw_pictures(section_of(tmp_path), tmp_path, "svg")
    assert speed.name == "speed_cpu-test-cpu-2-threads-torch2.15.0.svg"
    assert memory.name == "memory_cpu-test-cpu-2-threads-torch2.15.0.svg"
    for path in (speed, memory):
        text = path.read_text()
        assert text.startswith("<?xml")
        assert "<!-- CPU: Test CPU, 2 threads, PyTorch 2.15.0 -->" in text
        assert "<!-- records: train.json" in text
    assert "<!-- tresnet_m.miil_in1k -->" in speed.read_text()
    before = speed.read_bytes()
    draw_pictures(section_of(tmp_path), tmp_path, "svg")
    assert speed.read_bytes() == before


def test_without_figures_there_is_no_picture(tmp_path):
    put(tmp_path, "train", "bench_train", [step_row("tresnet_m", None)])
    assert draw_pictures(section_of(tmp_path), tmp_path, "png") == []


def test_pictures_need_matplotlib(tmp_path, monkeypatch):
    put(tmp_path, "train", "bench_train", ROWS)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'tresnet\[plot\]'"):
        draw_pictures(section_of(tmp_path), tmp_path, "png")
