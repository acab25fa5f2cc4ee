"""Records read back, their tables, and their pictures."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.measure.record_files import CPU, GPU, content, largest_row, op_row, put, step_row
from tresnet.errors import InputError, MissingDependencyError
from tresnet.measure.report import (
    draw_picture,
    published_top1,
    read_record,
    read_records,
    section_markdown,
    sections,
    speed_points,
    tables,
)


def said(line):
    """What a sound folder of records leaves to say: nothing."""
    raise AssertionError(line)


def damaged(change, what="bench_train", row=None):
    record = content(what, [row or step_row("tresnet_m", 10.0)], device=dict(GPU))
    change(record)
    return json.dumps(record)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", "values of another type"),
        ("{}", "a file without 'format'"),
        ("[" * 100_000, "recursion|deep|nest"),
        (damaged(lambda r: r.update(format=1)), "format 1, not 2"),
        (damaged(lambda r: r.pop("rows")), "a file without 'rows'"),
        (damaged(lambda r: r.update(rows=[1])), "values of another type"),
        (damaged(lambda r: r["rows"][0].pop("model")), "a file without 'model'"),
        (damaged(lambda r: r["environment"].update(device="cpu")), "values of another type"),
        (damaged(lambda r: r["environment"].update(date_utc="yesterday")), "yesterday"),
        (damaged(lambda r: r["environment"]["device"].pop("name")), "a file without 'name'"),
        (damaged(lambda r: r["environment"]["device"].update(power_limit_w="much")), "format code"),
        (damaged(lambda r: r["rows"][0].update(max_allocated_mib="many")), "another type"),
        (damaged(lambda r: r["rows"][0].update(p50_images_per_s=float("nan"))), "NaN for a number"),
        (damaged(lambda r: r["rows"][0].update(p50_images_per_s=10**400)), "int too large"),
        (damaged(lambda r: r["rows"][0].update(round_p50_images_per_s=[0.0])), "division by zero"),
        (
            damaged(lambda r: r["rows"][0].pop("shape"), "bench_ops", op_row("copy", 1.0, 1.0)),
            "shape",
        ),
    ],
)
def test_damaged_records_are_named_and_the_others_read(tmp_path, text, message):
    put(tmp_path, "sound", "bench_train", [step_row("tresnet_m", 10.0)])
    (tmp_path / "damaged.json").write_text(text)
    expected = rf"damaged\.json: expected a sound record, got .*({message})"
    with pytest.raises(InputError, match=expected):
        read_record(tmp_path / "damaged.json")
    told = []
    (record,) = read_records(tmp_path, told.append)
    assert record.name == "sound.json"
    (warning,) = told
    assert warning.startswith("warning: not drawn: ")


def test_what_is_no_record_at_all(tmp_path):
    with pytest.raises(InputError, match="expected a folder of records"):
        read_records(tmp_path / "none", said)
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(InputError, match=r"expected records \(\*\.json\) of .*, found none"):
        read_records(tmp_path, said)
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"x\.json: expected a sound record, got 'utf-8' codec"):
        read_record(tmp_path / "x.json")


def test_the_records_of_the_repository_can_be_drawn():
    records = read_records(Path(__file__).parents[2] / "benchmarks" / "records", str)
    assert {"bench_train", "bench_infer"} <= {record.what for record in records}
    assert all(tables(record) for record in records)


def section_of(folder):
    (section,) = sections(read_records(folder, said))
    return section


TRAINED = [
    step_row("timm:tresnet_m", 60.0, max_allocated_mib=2345.6),  # the baseline is measured first
    step_row("tresnet_m", 100.0, batch_size=64, max_allocated_mib=300.0),
    step_row("tresnet_m", 120.0, batch_size=128, compile="default", recompute="outputs"),
    step_row("tresnet_m", 90.0, batch_size=128, max_allocated_mib=600.0),
    step_row("tresnet_m", 999.0, status="not_finite"),
    step_row("tresnet_m", 130.0, input="uint8"),
    step_row("tresnet_m", 30.0, norm="inplace_abn", amp="fp16"),
    step_row("timm:tresnet_m", 50.0, batch_size=64, max_allocated_mib=500.0),
    step_row("torchvision:resnet50", None),
]
LARGEST = [
    largest_row("tresnet_m", 1600),
    largest_row("timm:tresnet_m", 1000),
    largest_row("torchvision:resnet50", 4096, limited_by="at most 4096"),
]
OPERATIONS = [
    op_row("copy", 2500.0, 1.0),
    op_row("eager", 1000.0, 0.4),
    op_row("triton", None, None, status="left_out", error="no GPU"),
    op_row("copy", 2500.0, 1.0, direction="backward"),
]
REPORT = """### Test GPU 80GB at 700 W, PyTorch 2.15.0

![picture](picture.svg)

**Training**, images per second (median step), measured in turns:

| model | its best settings | of | batch | images/s | tresnet_m ÷ it | Peak MiB |
| --- | --- | --- | --- | --- | --- | --- |
| timm:tresnet_m | amp bf16, channels_last, 224 px | 2 | 256 | 60.0 | 2.00 | 2,346 |
| tresnet_m | amp bf16, norm abn, recompute outputs, channels_last, compile default, 224 px | 4 | 128 | 120 | 1.00 | 1,000 |
| tresnet_m on uint8 | amp bf16, norm abn, channels_last, input uint8, 224 px | 1 | 256 | 130 | 0.92 | 1,000 |
| tresnet_m with inplace-abn | amp fp16, norm inplace_abn, channels_last, 224 px | 1 | 256 | 30.0 | 4.00 | 1,000 |
| torchvision:resnet50 | amp bf16, channels_last, 224 px | 1 | 256 | out_of_memory | - | - |

**Peak MiB of a training step** (in brackets tresnet_m ÷ it):

| model | settings | batch 64 | batch 128 | batch 256 |
| --- | --- | --- | --- | --- |
| timm:tresnet_m | amp bf16, channels_last, 224 px | 500 (0.60) | - | 2,346 |
| tresnet_m | amp bf16, norm abn, channels_last, 224 px | 300 (1.00) | 600 (1.00) | - |
| tresnet_m | amp bf16, norm abn, recompute outputs, channels_last, compile default, 224 px | - | 1,000 (0.60) | - |
| tresnet_m on uint8 | amp bf16, norm abn, channels_last, input uint8, 224 px | - | - | 1,000 |
| tresnet_m with inplace-abn | amp fp16, norm inplace_abn, channels_last, 224 px | - | - | 1,000 |

* tresnet_m, batch 256, amp bf16, norm abn, channels_last, 224 px: not finite: None
* torchvision:resnet50, batch 256, amp bf16, channels_last, 224 px: out of memory: CUDA out of memory

Record: `a.json` (2026-01-01T00:00:00+00:00), `tresnet bench train ...`

**Largest training batch** in 80.0 GiB:

| model | settings | largest batch | ended by | tresnet_m ÷ it |
| --- | --- | --- | --- | --- |
| tresnet_m | amp bf16, norm abn, channels_last, 224 px | 1600 | memory | 1.00 |
| timm:tresnet_m | amp bf16, channels_last, 224 px | 1000 | memory | 1.60 |
| torchvision:resnet50 | amp bf16, channels_last, 224 px | 4096 | at most 4096 | 0.39 |

Record: `b.json` (2026-01-01T00:00:00+00:00), `tresnet bench max_batch ...`

**Operations**, GB/s of the ideal bytes (share of a copy of the same bytes):

| operation | where | input | dtype | direction | copy | eager | triton |
| --- | --- | --- | --- | --- | --- | --- | --- |
| abn | stage 1 | 128 x 64 x 56 x 56 | bf16 | forward | 2,500 (100%) | 1,000 (40%) | left out |
| abn | stage 1 | 128 x 64 x 56 x 56 | bf16 | backward | 2,500 (100%) | - | - |

* triton, abn: left out: no GPU

Record: `c.json` (2026-01-01T00:00:00+00:00), `tresnet bench ops ...`"""


def test_a_section_holds_every_table_with_its_record(tmp_path):
    put(tmp_path, "a", "bench_train", TRAINED)
    put(tmp_path, "b", "bench_max_batch", LARGEST)
    put(tmp_path, "c", "bench_ops", OPERATIONS)
    put(tmp_path, "empty", "bench_infer", [])
    text = section_markdown(section_of(tmp_path), ["![picture](picture.svg)"])
    assert text.splitlines() == REPORT.splitlines()


def last_columns(tmp_path, what, rows, **keywords):
    """The last two cells of each line of a record's first table, header first."""
    table = tables(read_record(put(tmp_path, "record", what, rows, **keywords)))[0]
    lines = [line.split("|")[-3:-1] for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in (lines[0], *lines[2:])]


def test_ratios_are_of_the_same_rounds_where_cases_took_turns(tmp_path):
    rows = [
        step_row("tresnet_m", 100.0, round_p50_images_per_s=[100.0, 50.0, 100.0]),
        step_row("timm:tresnet_m", 50.0, round_p50_images_per_s=[50.0, 25.0, 10.0]),
        step_row("timm:resnet50", 40.0, round_p50_images_per_s=[50.0, 50.0, 20.0]),
    ]

    def ratios(rows, **settings):
        return [row[0] for row in last_columns(tmp_path, "bench_train", rows, **settings)[1:]]

    assert ratios(rows) == ["1.00", "2.00", "2.00"]
    assert ratios(rows, interleave=False) == ["1.00", "2.00", "2.50"]
    assert ratios([step_row("tresnet_m", None), *rows[1:]]) == ["-", "-", "-"]


def test_a_cpus_memory_is_that_of_the_process(tmp_path):
    rows = [step_row("tresnet_m", 1.0, max_allocated_mib=None, rss_peak_mib=777.0)]
    header, line = last_columns(tmp_path, "bench_infer", rows, device=CPU)
    assert (header[1], line[1]) == ("Peak MiB of the process", "777")


def test_devices_and_versions_never_mix(tmp_path):
    rows = [step_row("tresnet_m", 100.0), step_row("timm:tresnet_m", 60.0)]
    put(tmp_path, "cpu", "bench_train", rows, device=CPU)
    put(tmp_path, "old", "bench_train", rows, torch="2.14.0")
    put(tmp_path, "new", "bench_train", rows)
    put(tmp_path, "new_infer", "bench_infer", rows)
    throttled = {"type": "cuda", "name": "Test GPU 80GB", "power_limit_w": 400.0}
    put(tmp_path, "throttled", "bench_train", rows, device=throttled)
    found = sections(read_records(tmp_path, said))
    assert [(one[0].title, [record.name for record in one]) for one in found] == [
        ("Test GPU 80GB at 400 W, PyTorch 2.15.0", ["throttled.json"]),
        ("Test GPU 80GB at 700 W, PyTorch 2.14.0", ["old.json"]),
        ("Test GPU 80GB at 700 W, PyTorch 2.15.0", ["new.json", "new_infer.json"]),
        ("CPU: Test CPU, 2 threads, PyTorch 2.15.0", ["cpu.json"]),
    ]


@pytest.mark.parametrize(
    ("model", "size", "expected"),
    [
        ("tresnet_m", 224, {"tresnet_m.miil_in1k": 80.816, "tresnet_m.miil_in21k_ft_in1k": 83.09}),
        ("timm:tresnet_m", 448, {"tresnet_m.miil_in1k_448": 81.71}),
        ("torchvision:resnet50", 224, {"resnet50.IMAGENET1K_V2": 80.858}),
        ("torchvision:resnet50", 160, {}),
        ("timm:resnet50", 224, {}),
    ],
)
def test_accuracy_is_as_published(model, size, expected):
    assert published_top1(model, size) == expected


def test_points_are_the_best_of_all_records(tmp_path):
    """benchmarks/gpu.sh measures memory, eagerly, after the comparison of all settings."""
    put(tmp_path, "a", "bench_train", TRAINED)
    rows = [step_row("timm:tresnet_m", 59.0), step_row("timm:resnet50", 70.0)]
    put(tmp_path, "b", "bench_train", rows, date="2026-02-01T00:00:00+00:00")
    section = section_of(tmp_path)
    found = {
        (row["model"], row["p50_images_per_s"], name)
        for row, name in speed_points(section, "bench_train")
    }
    assert found == {
        ("tresnet_m", 120.0, "a.json"),
        ("tresnet_m", 130.0, "a.json"),
        ("tresnet_m", 30.0, "a.json"),
        ("timm:tresnet_m", 60.0, "a.json"),
        ("timm:resnet50", 70.0, "b.json"),
    }
    assert speed_points(section, "bench_infer") == []


def test_the_picture_is_drawn_and_marked(tmp_path):
    pytest.importorskip("matplotlib")
    put(tmp_path, "train", "bench_train", TRAINED, device=CPU)
    picture = draw_picture(section_of(tmp_path), tmp_path, "svg")
    assert picture.name == "speed_cpu-test-cpu-2-threads-torch2.15.0.svg"
    text = picture.read_text()
    assert text.startswith("<?xml")
    assert "<!-- CPU: Test CPU, 2 threads, PyTorch 2.15.0 -->" in text
    assert "<!-- records: train.json" in text
    assert "<!-- tresnet_m.miil_in1k -->" in text
    draw_picture(section_of(tmp_path), tmp_path, "svg")
    assert picture.read_text() == text


def test_without_figures_there_is_no_picture(tmp_path):
    put(tmp_path, "train", "bench_train", [step_row("tresnet_m", None)])
    assert draw_picture(section_of(tmp_path), tmp_path, "png") is None


def test_pictures_need_matplotlib(tmp_path, monkeypatch):
    put(tmp_path, "train", "bench_train", TRAINED)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'tresnet\[plot\]'"):
        draw_picture(section_of(tmp_path), tmp_path, "png")
