from tests.measure.record_files import CPU, largest_row, op_row, put, step_row
from tresnet.measure.read_records import read_record, read_records
from tresnet.measure.report import (
    largest_table,
    memory_table,
    ops_table,
    section_markdown,
    sections,
    speed_table,
)


def cells(table):
    """Cells of the lines of the Markdown table in `table`, header first."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert set(rows.pop(1)) == {"---"}
    assert len({len(row) for row in rows}) == 1
    return rows


def record_of(tmp_path, what, rows, **keywords):
    return read_record(put(tmp_path, "record", what, rows, **keywords))


def test_each_contender_at_its_best(tmp_path):
    rows = [
        step_row("tresnet_m", 100.0),
        step_row("tresnet_m", 120.0, batch_size=128, compile="default", partitioner="aggressive"),
        step_row("tresnet_m", 30.0, norm="inplace_abn", dtype="fp16"),
        step_row("timm:tresnet_m", 60.0, max_allocated_mib=2345.6),
        step_row("timm:tresnet_m", 50.0, compile="default"),
        step_row("torchvision:resnet50", None),
    ]
    table = speed_table(record_of(tmp_path, "bench_train", rows))
    header, *lines = cells(table)
    assert header[4:] == ["images/s", "tresnet_m ÷ it", "Peak MiB"]
    assert [line[0] for line in lines] == [
        "tresnet_m",
        "tresnet_m with inplace-abn",
        "timm:tresnet_m",
        "torchvision:resnet50",
    ]
    settings = "bf16, autocast, abn, channels_last, compile default, partitioner aggressive, 224 px"
    assert lines[0][1:] == [settings, "2", "128", "120", "1.00", "1,000"]
    assert lines[1][4:6] == ["30.0", "4.00"]
    assert lines[2][3:] == ["256", "60.0", "2.00", "2,346"]
    assert lines[3][4:] == ["out_of_memory", "-", "-"]
    assert "* torchvision:resnet50, batch 256" in table
    assert "out of memory: CUDA out of memory" in table


def test_a_model_fed_bytes_is_a_contender_of_its_own(tmp_path):
    rows = [step_row("tresnet_m", 100.0), step_row("tresnet_m", 120.0, input="uint8")]
    lines = cells(speed_table(record_of(tmp_path, "bench_train", rows)))[1:]
    assert [line[0] for line in lines] == ["tresnet_m", "tresnet_m on uint8"]
    assert "uint8 input" in lines[1][1]


def test_ratios_are_of_the_same_rounds_where_cases_took_turns(tmp_path):
    rows = [
        step_row("tresnet_m", 100.0, round_p50_images_per_s=[100.0, 50.0, 100.0]),
        step_row("timm:tresnet_m", 50.0, round_p50_images_per_s=[50.0, 25.0, 10.0]),
        step_row("timm:resnet50", 40.0, round_p50_images_per_s=[40.0, 40.0, 20.0]),
    ]
    in_turns = speed_table(record_of(tmp_path, "bench_train", rows))
    assert [line[5] for line in cells(in_turns)[1:]] == ["1.00", "2.00", "2.50"]
    apart = speed_table(record_of(tmp_path, "bench_train", rows, interleave=False))
    assert "one after another" in apart
    assert [line[5] for line in cells(apart)[1:]] == ["1.00", "2.00", "2.50"]
    rows[2]["round_p50_images_per_s"] = [50.0, 50.0, 20.0]
    in_turns = speed_table(record_of(tmp_path, "bench_train", rows))
    assert [line[5] for line in cells(in_turns)[1:]] == ["1.00", "2.00", "2.00"]


def test_without_figures_of_the_first_there_are_no_ratios(tmp_path):
    rows = [step_row("tresnet_m", None), step_row("timm:tresnet_m", 10.0)]
    lines = cells(speed_table(record_of(tmp_path, "bench_train", rows)))[1:]
    assert [line[5] for line in lines] == ["-", "-"]


def test_a_loss_that_is_not_finite_is_no_result(tmp_path):
    rows = [step_row("tresnet_m", 10.0), step_row("tresnet_m", 90.0, status="not_finite")]
    (line,) = cells(speed_table(record_of(tmp_path, "bench_train", rows)))[1:]
    assert line[4] == "10.0"


def test_memory_by_batch(tmp_path):
    rows = [
        step_row("tresnet_m", 1.0, batch_size=64, max_allocated_mib=300.0),
        step_row("tresnet_m", 1.0, batch_size=128, max_allocated_mib=600.0),
        step_row("timm:tresnet_m", 1.0, batch_size=64, max_allocated_mib=500.0),
        step_row("timm:tresnet_m", 1.0, batch_size=128, max_allocated_mib=1000.0),
        step_row("torchvision:resnet50", None, batch_size=128),
    ]
    rows.append(step_row("timm:resnet50", 1.0, batch_size=32, max_allocated_mib=200.0))
    table = memory_table(record_of(tmp_path, "bench_train", rows))
    assert table.startswith("**Peak MiB of a training step** (in brackets tresnet_m ÷ it):")
    header, *lines = cells(table)
    assert header[2:] == ["batch 32", "batch 64", "batch 128"]
    assert [line[2:] for line in lines] == [
        ["-", "300 (1.00)", "600 (1.00)"],
        ["-", "500 (0.60)", "1,000 (0.60)"],
        ["200", "-", "-"],
    ]
    assert memory_table(record_of(tmp_path, "bench_train", rows[:1])) == ""


def test_a_cpus_memory_is_that_of_the_process(tmp_path):
    rows = [step_row("tresnet_m", 1.0, max_allocated_mib=None, rss_peak_mib=777.0)]
    header, line = cells(speed_table(record_of(tmp_path, "bench_infer", rows, device=CPU)))
    assert header[-1] == "Peak MiB of the process"
    assert line[-1] == "777"


def test_largest_batches(tmp_path):
    rows = [
        largest_row("tresnet_m", 1600),
        largest_row("timm:tresnet_m", 1000),
        largest_row("torchvision:resnet50", 4096, limited_by="at most 4096"),
    ]
    table = largest_table(record_of(tmp_path, "bench_max_batch", rows))
    assert "in 80.0 GiB" in table
    lines = cells(table)[1:]
    assert [line[2:] for line in lines] == [
        ["1600", "memory", "1.00"],
        ["1000", "memory", "1.60"],
        ["4096", "at most 4096", "0.39"],
    ]


def test_operations(tmp_path):
    rows = [
        op_row("copy", 2500.0, 1.0),
        op_row("eager", 1000.0, 0.4),
        op_row("triton", None, None, status="left_out", note="no GPU"),
        op_row("copy", 2500.0, 1.0, direction="backward"),
    ]
    table = ops_table(record_of(tmp_path, "bench_ops", rows))
    header, forward, backward = cells(table)
    assert header == [
        "operation",
        "where",
        "input",
        "dtype",
        "direction",
        "copy",
        "eager",
        "triton",
    ]
    assert forward[2] == "128 x 64 x 56 x 56"
    assert forward[4:] == ["forward", "2,500 (100%)", "1,000 (40%)", "left out"]
    assert backward[4:] == ["backward", "2,500 (100%)", "-", "-"]
    assert "* triton, abn: left out: no GPU" in table


def test_devices_and_versions_never_mix(tmp_path):
    rows = [step_row("tresnet_m", 100.0), step_row("timm:tresnet_m", 60.0)]
    put(tmp_path, "cpu", "bench_train", rows, device=CPU)
    put(tmp_path, "old", "bench_train", rows, torch="2.14.0")
    put(tmp_path, "new", "bench_train", rows)
    put(tmp_path, "new_infer", "bench_infer", rows)
    throttled = {"type": "cuda", "name": "Test GPU 80GB", "power_limit_w": 400.0}
    put(tmp_path, "throttled", "bench_train", rows, device=throttled)
    found = sections(read_records(tmp_path))
    assert [(one.title, [record.name for record in one.records]) for one in found] == [
        ("Test GPU 80GB at 400 W, PyTorch 2.15.0", ["throttled.json"]),
        ("Test GPU 80GB at 700 W, PyTorch 2.14.0", ["old.json"]),
        ("Test GPU 80GB at 700 W, PyTorch 2.15.0", ["new.json", "new_infer.json"]),
        ("CPU: Test CPU, 2 threads, PyTorch 2.15.0", ["cpu.json"]),
    ]


def test_every_table_names_its_record(tmp_path):
    put(tmp_path, "one", "bench_train", [step_row("tresnet_m", 100.0)])
    put(tmp_path, "two", "bench_infer", [step_row("tresnet_m", 300.0)])
    put(tmp_path, "empty", "bench_infer", [])
    (section,) = sections(read_records(tmp_path))
    text = section_markdown(section, ["![picture](picture.svg)"])
    assert text.startswith("### Test GPU 80GB at 700 W, PyTorch 2.15.0\n\n![picture](picture.svg)")
    tables = text.split("**Inference**")
    assert len(tables) == 2
    for table, name in zip(tables, ("one", "two"), strict=True):
        assert f"Record: `{name}.json` (2026-01-01T00:00:00+00:00), `tresnet bench " in table
    assert "empty.json" not in text
